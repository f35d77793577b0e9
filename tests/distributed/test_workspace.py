"""What the plan says of the workspace is what a child allocates, within alignment."""

from __future__ import annotations

import pytest

import megatron_lw
from megatron_lw.optimizer.workspace import peak_workspace_numel
from tests.distributed.cases import build
from tests.harness import run_ranks

SHAPES = {f"m{i}_weight": (96, 64 + 32 * (i % 3)) for i in range(9)} | {"big_weight": (300, 280)}
CONFIG = {"optimizer": "muon", "lr": 0.05}


def allocated(tensor, bucket_size):
    groups = megatron_lw.ParallelGroups.create(tensor=tensor)
    tags = {name: {"tp_dim": 0} for name in SHAPES} if tensor > 1 else {}
    _, optimizer = build(SHAPES, CONFIG, bucket_size=bucket_size, tags=tags, groups=groups)
    (plan,) = optimizer.runtime.plans.values()
    (child,) = optimizer.runtime.children
    planned = 2 * int(peak_workspace_numel(plan)[groups.tp_dp.rank])
    return child.workspace_nbytes, planned


@pytest.mark.parametrize(
    ("ranks", "tensor", "bucket_size"), [(1, 1, None), (3, 1, 20000), (2, 2, 20000), (4, 2, None)]
)
def test_planned_workspace_is_what_is_allocated(ranks, tensor, bucket_size):
    for nbytes, planned in run_ranks(allocated, ranks, tensor, bucket_size):
        assert planned <= nbytes <= 1.05 * planned + 8192, (nbytes, planned)
