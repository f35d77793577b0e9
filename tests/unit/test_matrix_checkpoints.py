"""Every kind of matrix through a real checkpoint; ratios, policies, parameters never touched.

One process; class bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw.dist_checkpointing import CheckpointWarning, load, save
from megatron_lw.dist_checkpointing.directory import read_manifest
from megatron_lw.dist_checkpointing.manifest_json import to_bytes
from tests.distributed.cases import build, integer_grads

SHAPES = {
    "a_conv3d": (24, 3, 2, 2, 2), "b_conv1d": (24, 4, 3), "c_qkv": (48, 20), "d_blocks": (36, 24),
    "e_padded": (32, 24), "f_stack": (3, 8, 12), "g_untouched": (16, 12), "h_bias": (24,),
}  # fmt: skip
TAGS: dict[str, dict[str, Any]] = {
    "c_qkv": {"qkv": (8, 4, 2, 2)}, "d_blocks": {"blocks": (12, 18)},
    "e_padded": {"logical_rows": 25}, "f_stack": {"matrices": 3},
}  # fmt: skip
MUON = {"optimizer": "muon", "lr": 0.05, "clip_grad": 0.0, "weight_decay": 0.1}
UNTOUCHED = "g_untouched"
MATRICES = set(SHAPES) - {"h_bias"}


def built(seed: int = 0, **settings: Any) -> Any:
    groups = megatron_lw.ParallelGroups.single()
    return build(SHAPES, {**MUON, **settings}, tags=TAGS, groups=groups, seed=seed)


def train(run: Any, first: int, stop: int) -> dict[str, torch.Tensor]:
    """Logical elements after steps in which one matrix takes no part; no checkpoint has padding."""
    ddp, optimizer = run
    for number in range(first, stop):
        optimizer.zero_grad()
        grads = integer_grads(SHAPES, 0, number)
        del grads[UNTOUCHED]
        ddp(grads).backward()
        optimizer.step()
    rows = {name: tag.get("logical_rows") for name, tag in TAGS.items()}
    params = ddp.module.named_parameters()
    return {name: param.detach()[: rows.get(name)].clone() for name, param in params}


def same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "adamuon"])
@pytest.mark.parametrize("steps", [0, 2])
def test_every_kind_of_matrix_goes_on_from_a_checkpoint(
    optimizer: str, steps: int, tmp_path: Path
) -> None:
    """Also before the first step, and a parameter that never had a gradient."""
    run = built(optimizer=optimizer)
    train(run, 0, steps)
    path = save(tmp_path, *run, step=steps)
    whole = train(run, steps, 4)
    other = built(seed=5, optimizer=optimizer)
    load(path, *other)
    assert same(train(other, steps, 4), whole)
    assert set(other[1].state) == MATRICES


def test_a_parameter_without_gradients_has_a_state_of_zeros_and_decays(tmp_path: Path) -> None:
    run = built()
    start = run[0].module.get_parameter(UNTOUCHED).detach().clone()
    weights = train(run, 0, 3)
    expected = start.clone()
    for _ in range(3):
        expected.mul_(1 - 0.05 * 0.1)
    assert torch.equal(weights[UNTOUCHED], expected)
    assert run[1].state[UNTOUCHED]["lr_ratio"] == 4.0
    manifest = read_manifest(save(tmp_path, *run, step=3))
    saved = {(tensor.name, tensor.state) for tensor in manifest.tensors}
    assert {(name, "momentum") for name in MATRICES} <= saved


STALE: dict[str, Any] = {
    "stale": lambda name: {"lr_ratio": 1e6},
    "of another kind": lambda name: {"lr_ratio": "large"},
    "none": None,
    "none for some": lambda name: {"lr_ratio": 1e6} if name < "d" else {},
}


@pytest.mark.parametrize("ratios", STALE.values(), ids=STALE)
def test_ratios_of_a_checkpoint_may_be_stale_or_missing(ratios: Any, tmp_path: Path) -> None:
    """They are passed over: steps go on as they would, and the record is right at once."""
    run = built()
    train(run, 0, 2)
    path = save(tmp_path, *run, step=2)
    manifest = read_manifest(path)
    values = {} if ratios is None else {name: ratios(name) for name in sorted(MATRICES)}
    child = replace(manifest.children["muon"], values={n: v for n, v in values.items() if v})
    changed = replace(manifest, children={**manifest.children, "muon": child})
    (path / "manifest.json").write_bytes(to_bytes(changed))
    assert read_manifest(path).children["muon"].values != manifest.children["muon"].values

    whole = train(run, 2, 4)
    right = {name: run[1].state[name]["lr_ratio"] for name in MATRICES}
    other = built(seed=5)
    load(path, *other)
    assert same(train(other, 2, 4), whole)
    assert {name: other[1].state[name]["lr_ratio"] for name in MATRICES} == right


def add_group(run: Any, clipped: bool) -> None:
    """The bias in a group of its own, whose policy is set as schedulers set things."""
    run[1].add_param_group({"params": [run[0].module.get_parameter("h_bias")], "max_lr": 0.01})
    [group] = [g for g in run[1].param_groups if "max_lr=0.01" in g["name"]]
    group["clip_grad"] = clipped


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("saved_too", [False, True])
def test_the_policy_of_a_group_added_later_is_its_own(
    saved_too: bool, clipped: bool, tmp_path: Path
) -> None:
    """The checkpoint does not have the group, or has it with the other policy."""
    extra = {"groups": [{"name": "mine", "clip_grad": not clipped}], "lr_ratio": 1.0}
    given = {"groups": [dict(extra["groups"][0])], "lr_ratio": 1.0}
    run = built(clip_grad=0.5)
    if saved_too:
        add_group(run, not clipped)
    train(run, 0, 1)
    path = save(tmp_path, *run, None, extra, step=1)
    other = built(clip_grad=0.5, muon_clip_grad=not clipped)
    add_group(other, clipped)
    expected = nullcontext() if saved_too else pytest.warns(CheckpointWarning, match="keep their")
    with expected:
        loaded = load(path, *other)
    policies = {g["optimizer"]: g["clip_grad"] for g in other[1].param_groups if g["params"]}
    assert policies == {"muon": not clipped, "adam": clipped}
    assert extra == given == loaded.extra, "neither is changed"
