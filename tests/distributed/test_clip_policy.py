"""Which gradients are clipped, and by which norm. Class exact sums unless a test says otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw import ConfigError, PlanMismatchError
from megatron_lw.optimizer.param_groups import POLICIES
from tests.distributed.cases import build, integer_grads, mean_grads, relative
from tests.harness import run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (70,), "d_bias": (33,)}
MUON = {
    "optimizer": "muon", "lr": 0.05, "clip_grad": 2.0, "weight_decay": 0.0, "adam_eps": 1.0,
    "muon_fp32_matmul_prec": "highest",
}  # fmt: skip
MATRICES = ("a_weight", "b_weight")


def _momenta(
    config: dict[str, Any], overrides: Any = None, late: bool = False
) -> tuple[dict[str, torch.Tensor], float]:
    """After one step, first moment over (1 - beta): the gradient that the children saw."""
    options = {} if overrides is None else {"config_overrides": overrides}
    ddp, optimizer = build(SHAPES, config, bucket_size=1, **options)
    if late:
        optimizer.add_param_group({"params": [ddp.module.c_bias], "clip_grad": False})
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, ddp.groups.dp.rank, 0)).backward()
    norm = optimizer.step()[1]
    seen: dict[str, torch.Tensor] = {}
    runtime = optimizer.runtime
    children = {child.name: child for child in runtime.children}
    planned = [bucket.child for plan in runtime.plans.values() for bucket in plan.buckets]
    for place, (bucket, kind) in enumerate(zip(runtime.buckets, planned, strict=True)):
        key, beta = ("momentum", 0.95) if kind == "muon" else ("exp_avg", 0.9)
        row = children[kind].state_rows(planned[:place].count(kind))[key] / (1 - beta)
        for name, slot in bucket.row_slots():
            whole = seen.setdefault(name, torch.zeros(math.prod(SHAPES[name])))
            part = row[slot.row_start : slot.row_start + slot.numel]
            whole[slot.param_start : slot.param_start + slot.numel] = part
    return seen, norm


def seen_by(config: dict[str, Any], ranks: int, overrides: Any = None, late: bool = False) -> Any:
    runs = run_ranks(_momenta, ranks, {**MUON, **config}, overrides, late)
    norms = {norm for _, norm in runs}
    assert len(norms) == 1
    whole = {name: sum(seen.get(name, 0) for seen, _ in runs) for name in SHAPES}
    return whole, norms.pop()


def expected(ranks: int, exempt: tuple[str, ...], own: bool) -> tuple[dict[str, Any], float]:
    grads = mean_grads("integer", SHAPES, ranks, 0)
    total = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    rest = [g for name, g in grads.items() if name not in exempt]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in rest)) if own else total
    clip = 2.0 / (norm + 1e-6)
    assert clip < 0.5, "the clip is at work"
    return {n: g * (1.0 if n in exempt else clip) for n, g in grads.items()}, total


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("exempt", [(), MATRICES])
def test_what_is_exempt_is_left_alone_and_the_rest_clipped(
    ranks: int, own: bool, exempt: tuple[str, ...]
) -> None:
    config = {"muon_clip_grad": not exempt, "clip_grad_by": "own" if own else "total"}
    seen, norm = seen_by(config, ranks)
    grads, total = expected(ranks, exempt, own)
    assert norm == pytest.approx(total, rel=1e-6), "the norm of all is reported"
    for name, grad in grads.items():
        assert relative(seen[name], grad.view(-1)) < 1e-5, name


@pytest.mark.parametrize("late", [False, True])
def test_one_group_is_exempt_by_an_override_or_added_later(late: bool) -> None:
    overrides = None if late else {megatron_lw.ParamKey(name="c_bias"): {"clip_grad": False}}
    seen, _ = seen_by({"clip_grad_by": "own"}, 2, overrides, late)
    grads, _ = expected(2, ("c_bias",), True)
    for name, grad in grads.items():
        assert relative(seen[name], grad.view(-1)) < 1e-5, name


def test_the_policy_is_a_live_setting_with_the_configurations_default() -> None:
    groups = megatron_lw.ParallelGroups.single()
    _, optimizer = build(SHAPES, {**MUON, "muon_clip_grad": False}, groups=groups)
    policies = {group["optimizer"]: group["clip_grad"] for group in optimizer.param_groups}
    assert policies == {"muon": False, "adam": True}
    assert POLICIES == {"clip_grad"}, "what a checkpoint never restores"
    optimizer.param_groups[0]["clip_grad"] = 1
    with pytest.raises(ConfigError, match="clip_grad = 1; it must be True or False"):
        optimizer.step()


def _differing() -> None:
    ddp, optimizer = build(SHAPES, MUON)
    optimizer.param_groups[0]["clip_grad"] = ddp.groups.dp.rank == 0
    ddp(integer_grads(SHAPES, 0, 0)).backward()
    with pytest.raises(PlanMismatchError, match="different settings"):
        optimizer.step()


def test_ranks_with_different_policies_are_found() -> None:
    run_ranks(_differing, 2)
