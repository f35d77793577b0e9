"""Sends and receives between two ranks of a group. Class *bitwise*."""

from __future__ import annotations

import pytest
import torch

import megatron_lw
from megatron_lw.distributed import collectives
from tests.harness import expect_failure_on_all, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def pass_on():
    """The rank before sends, along a pipeline of three stages, over a group of its own."""
    group = megatron_lw.ParallelGroups.create(pipeline=3).pp
    values = [torch.arange(7).to(dtype).view(7, 1) for dtype in DTYPES]
    for value in values:
        received = value if group.rank == 0 else torch.zeros_like(value)
        if group.rank > 0:
            collectives.recv(received, group.rank - 1, group)
            assert torch.equal(received, value)
        if group.rank < group.size - 1:
            collectives.send(received, group.rank + 1, group)
    return dict(group.traffic.calls), dict(group.traffic.nbytes)


def test_tensors_arrive_whatever_their_dtype_and_are_counted():
    first, middle, last = run_ranks(pass_on, 3)
    nbytes = 7 * (4 + 2 + 1 + 8)
    assert first == ({"send": 4}, {"send": nbytes})
    assert middle == ({"send": 4, "recv": 4}, {"send": nbytes, "recv": 0})
    assert last == ({"recv": 4}, {"recv": 0})


def address(call, rank):
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    target = groups.pp.rank if rank == "itself" else rank
    vars(collectives)[call](torch.zeros(1), target, groups.pp if rank != 0 else groups.tp)


@pytest.mark.parametrize("call", ["send", "recv"])
@pytest.mark.parametrize("rank", ["itself", 2, -1, 0], ids=["itself", "2", "-1", "group of one"])
def test_a_partner_that_does_not_exist_is_refused(call, rank):
    """A group of one has no process group: torch would take the default one."""
    expect_failure_on_all(address, 2, megatron_lw.ConfigError, "is no partner for rank", call, rank)
