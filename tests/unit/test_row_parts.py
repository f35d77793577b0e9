"""Runs of a row that are stepped in one call. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw.optimizer.children import matrix_bucket
from tests.distributed.cases import build, initial_values, power_law_grads

SHAPES = {
    **{f"a{i}_weight": (32, 64) for i in range(4)},
    **{f"b{i}_weight": (17, 23) for i in range(3)},
    "c0_weight": (24, 40),
}
CONFIG: dict[str, Any] = {
    "optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0,
    "muon_coefficient_type": "simple", "muon_scale_mode": "shape_scaling",
}  # fmt: skip


@pytest.mark.parametrize(("at_most", "first"), [(1 << 18, [8192]), (3072, [3072, 3072, 2048])])
def test_runs_that_touch_are_one_and_keep_every_bit(
    at_most: int, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class bitwise against torch, also where a run ends between the places of a kernel, or is cut.

    A long one is cut on a CPU, whose copy of it in fp32 would leave the cache.
    """
    monkeypatch.setattr(matrix_bucket, "_CPU_RUN", at_most)
    groups = megatron_lw.ParallelGroups.single()
    ddp, optimizer = build(SHAPES, CONFIG, groups=groups)
    [child] = optimizer.runtime.children
    [bucket] = child._buckets
    lengths = {part.shape: [w.numel() for w in part.weights] for part in bucket.parts}
    assert lengths == {(32, 64): first, (17, 23): [17 * 23] * 3, (24, 40): [24 * 40]}

    params = {n: torch.nn.Parameter(v) for n, v in initial_values(SHAPES).items()}
    theirs = torch.optim.Muon(
        list(params.values()), lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=False,
        adjust_lr_fn="original",
    )  # fmt: skip
    for step in range(3):
        grads = power_law_grads(SHAPES, 0, step)
        optimizer.zero_grad()
        ddp(grads).backward()
        optimizer.step()
        for name, param in params.items():
            param.grad = grads[name]
        theirs.step()
    for name, param in params.items():
        assert torch.equal(ddp.module.get_parameter(name), param), name


def test_blocks_of_equal_shape_touch_and_padding_between_does_not() -> None:
    """Exact: three blocks of one parameter are one run; rows of no matrix are runs of their own."""
    shapes = {"a_weight": (40, 64)}
    tags = {"a_weight": {"blocks": (8, 8, 16)}}
    groups = megatron_lw.ParallelGroups.single()
    _, optimizer = build(shapes, CONFIG, groups=groups, tags=tags)
    [child] = optimizer.runtime.children
    lengths = {p.shape: [w.numel() for w in p.weights] for p in child._buckets[0].parts}
    assert lengths == {(8, 64): [16 * 64], (16, 64): [16 * 64], None: [8 * 64]}
