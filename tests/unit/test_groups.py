"""Rank arithmetic of the process groups, and one-rank groups without torch.distributed."""

from __future__ import annotations

import pytest

from megatron_lw import ConfigError, ParallelGroups
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from megatron_lw.groups import rank_partition
from tests.harness import run_ranks


def test_partition_of_eight_ranks_is_megatrons():
    sizes = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}
    assert rank_partition(sizes, ("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert rank_partition(sizes, ("cp", "dp")) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert rank_partition(sizes, ("pp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert rank_partition(sizes, ("tp", "cp", "dp")) == ((0, 1, 2, 3), (4, 5, 6, 7))


def created(sizes):
    groups = ParallelGroups.create(**sizes)
    return {f: getattr(groups, f).ranks for f in groups.__dataclass_fields__}


def test_expert_groups_redivide_a_stage():
    """T2 E2 ET1 on 4 ranks: dense dp 2, expert dp 2."""
    found = run_ranks(created, 4, {"tensor": 2, "expert": 2, "expert_tensor": 1})
    assert [f["tp"] for f in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [f["dp"] for f in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [f["ep"] for f in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [f["expert_dp"] for f in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [f["expert_tp"] for f in found] == [(0,), (1,), (2,), (3,)]
    assert all(f["world"] == f["grad_stats"] == f["replicas"] == (0, 1, 2, 3) for f in found)


def test_pipeline_ends_share_the_embedding_group():
    found = run_ranks(created, 3, {"pipeline": 3})
    assert [f["embedding"] for f in found] == [(0, 2), (1,), (0, 2)]
    assert [f["pp"] for f in found] == [(0, 1, 2)] * 3


def adopted():
    import torch.distributed as dist

    world = dist.new_group([0, 1])
    groups = ParallelGroups.from_torch({"world": world, "dp": world})
    problems = []
    for handles in ({"world": world}, {"dp": world}, {"world": world, "dp": world, "x": world}):
        try:
            ParallelGroups.from_torch(handles)
        except ConfigError as error:
            problems.append(str(error))
    return {f: getattr(groups, f).size for f in groups.__dataclass_fields__}, problems


def test_groups_from_torch_fill_in_what_follows_and_refuse_what_is_missing():
    for sizes, problems in run_ranks(adopted, 2):
        together = {"world", "dp", "expert_dp", "tp_dp", "expert_tp_dp", "grad_stats", "replicas"}
        together.add("control")
        assert {name for name, size in sizes.items() if size == 2} == together
        assert "'dp' is missing" in problems[0]
        assert "'world' is missing" in problems[1]
        assert "unknown group 'x'" in problems[2]


def test_one_process_needs_no_torch_distributed():
    groups = ParallelGroups.single()
    assert all(getattr(groups, f).size == 1 for f in groups.__dataclass_fields__)
    assert not collectives.is_initialised()
    with pytest.raises(ConfigError, match="init_process_group"):
        ParallelGroups.create()


def test_a_group_without_a_process_group_has_one_rank():
    with pytest.raises(ConfigError, match="no process group"):
        Group("dp", (0, 1), 0, None)
    with pytest.raises(ConfigError, match="not an index"):
        Group("dp", (0, 1), 2, None)


def made_and_destroyed():
    import torch

    totals = []
    for _ in range(3):
        groups = ParallelGroups.create(tensor=2)
        value = torch.ones(1)
        collectives.all_reduce(value, groups.dp)
        collectives.all_reduce(value, groups.world)
        groups.destroy()
        totals.append(float(value))
    return totals


def test_groups_can_be_made_and_destroyed_again():
    for totals in run_ranks(made_and_destroyed, 4):
        assert totals == [8.0, 8.0, 8.0]
