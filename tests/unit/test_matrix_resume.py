"""Scale and clip policy through real checkpoints. One process; class bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw.dist_checkpointing import load, save
from megatron_lw.dist_checkpointing.directory import read_manifest
from tests.distributed.cases import build, integer_grads

SHAPES = {"a_weight": (24, 48), "b_weight": (36, 24), "c_bias": (24,)}
TAGS = {"b_weight": {"blocks": (12, 18)}}
MUON = {"optimizer": "muon", "lr": 0.05, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}


def built(**settings: Any) -> Any:
    groups = megatron_lw.ParallelGroups.single()
    return build(SHAPES, {**MUON, **settings}, tags=TAGS, groups=groups)


def step(ddp: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, 0, number)).backward()
    optimizer.step()


def weights(ddp: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("steps", [0, 1])
def test_the_ratio_is_saved_and_a_changed_mode_acts_at_the_first_step(
    tmp_path: Path, steps: int
) -> None:
    """Also of a run that has not stepped; momentum and step counts come along."""
    ddp, optimizer = built()
    for number in range(steps):
        step(ddp, optimizer, number)
    path = save(tmp_path, ddp, optimizer, step=steps)
    values = read_manifest(path).children["muon"].values
    assert set(values) == {"a_weight", "b_weight"}
    assert all("lr_ratio" in str(value) for value in values.values())

    for group in optimizer.param_groups:
        if group["optimizer"] == "muon":
            group.update(scale_mode="shape_scaling", extra_scale_factor=0.5)
    step(ddp, optimizer, steps)

    changed = {"muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 0.5}
    other, resumed = built(**changed)
    load(path, other, resumed, keep_settings=("scale_mode", "extra_scale_factor"))
    step(other, resumed, steps)
    assert resumed.state["a_weight"]["lr_ratio"] == 0.5
    expected = weights(ddp)
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())


def test_the_clip_policy_is_the_present_configurations(tmp_path: Path) -> None:
    ddp, optimizer = built(clip_grad=1.0)
    path = save(tmp_path, ddp, optimizer, step=0)
    other, resumed = built(clip_grad=1.0, muon_clip_grad=False, lr=0.5)
    load(path, other, resumed)
    policies = {g["optimizer"]: (g["clip_grad"], g["lr"]) for g in resumed.param_groups}
    assert policies == {"muon": (False, 0.05), "adam": (True, 0.05)}
