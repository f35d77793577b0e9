"""Metrics of small plans, worked out by hand; exact."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_lw.optimizer.plan import OwnershipPlan, PlanMetrics, PlanParam, plan_domain
from megatron_lw.optimizer.workspace import peak_workspace_numel


def sharded_matrix() -> OwnershipPlan:
    """One 64 x 64 matrix over tp 2 and dp 2: four holders of 1024 elements each, rank 0 owns it."""
    param = PlanParam(name="w", numel=2048, matrix=(64, 64), sharded=True, child="muon")
    return plan_domain([param], dp=2, tp=2)


def test_a_matrix_over_two_rows_and_two_tensor_parallel_ranks() -> None:
    plan = sharded_matrix()
    assert plan.owner.tolist() == [0]
    metrics = plan.metrics()
    assert metrics.reduce_bytes == 1024 * 4
    assert metrics.gather_bytes == 1024 * 2
    # Each rank sends 1024 to the other row; half the matrix, 2048, travels within the owner's row.
    assert metrics.exchange_bytes == 1024 * 2
    assert metrics.exchange_busiest == 2048 / 6144
    assert metrics.tp_exchange_bytes == 2048 * 2
    assert metrics.tp_exchange_fraction == 1 / 2
    assert metrics.max_peers == 2
    assert metrics.ranks_without_matrix == 3
    assert metrics.matrices_whole_fraction == 0.0
    assert metrics.row_over_largest == 0.5
    assert metrics.exchange_limit == 1 / 1 + 2 * 2048 / 2048
    assert metrics.ns_makespan_over_bound == 1.0
    assert metrics.state_bytes == 1024 * (4 + 4)
    assert metrics.gradient_bytes == 2048 * 4


def test_bytes_are_arguments() -> None:
    metrics = sharded_matrix().metrics(
        reduce_bytes=2, gather_bytes=1, exchange_bytes=4, matrix_state_bytes=8
    )
    assert (metrics.reduce_bytes, metrics.gather_bytes) == (2048, 1024)
    assert metrics.exchange_bytes == 1024 * 4
    assert metrics.state_bytes == 1024 * 12
    assert metrics.gradient_bytes == 2048 * 2


def test_workspace_of_a_cut_and_divided_matrix() -> None:
    """64 x 64 over two rows of two tensor ranks; rank 0 owns it.

    A row of 1024 and its fp32 scratch (2 x 1024) on every rank. The owner's row assembles 2048 and
    passes 2048 on and back; the other row sends 1024. The owner holds the whole twice and iterates
    on two of 4096 and two of 64 x 64.
    """
    owners_row, other_row = 3 * 1024 + 3 * 2048, 3 * 1024 + 1024
    owner = owners_row + 2 * 4096 + 2 * 4096 + 2 * 4096
    assert peak_workspace_numel(sharded_matrix()).tolist() == [
        owner,
        owners_row,
        other_row,
        other_row,
    ]


def test_workspace_of_whole_matrices_is_one_batch() -> None:
    """Two equal matrices a rank are one batch, in a row of 1024; they do not travel."""
    params = [PlanParam(name=f"w{i}", numel=512, matrix=(16, 32), child="muon") for i in range(4)]
    plan = plan_domain(params, dp=2)
    assert peak_workspace_numel(plan).tolist() == [3 * 1024 + 2 * (2 * 512 + 2 * 256)] * 2


def test_workspace_counts_three_buckets_in_flight() -> None:
    """One matrix a bucket, each cut in two halves of 128: three are in flight, one iterated on."""
    params = [PlanParam(name=f"w{i}", numel=256, matrix=(16, 16), child="muon") for i in range(4)]
    plan = plan_domain(params, dp=2, bucket_size=256)
    assert len(plan.buckets) == 4
    assert np.sort(plan.owner).tolist() == [0, 0, 1, 1]
    assembled, leaving, arriving = 256, 128, 128
    in_flight = 3 * (128 + assembled + leaving + arriving)
    assert peak_workspace_numel(plan).tolist() == [in_flight + 2 * 128 + 4 * 256] * 2


def test_memory_counts_what_padding_wastes() -> None:
    params = [
        PlanParam(name="b", numel=65, child="adam"),
        PlanParam(name="w", numel=4096, matrix=(64, 64), child="muon"),
    ]
    metrics = plan_domain(params, dp=2).metrics()
    assert metrics.state_bytes == 64 * 12 + 2048 * 8
    assert metrics.memory_over_ideal == metrics.state_bytes / ((65 * 12 + 4096 * 8) / 2)
    assert (metrics.numel, metrics.padding) == (4161, 63)
    assert metrics.padding_fraction == 63 / 4161
    assert metrics.padding_limit == 64 * (2 * 2 + 2)


def test_limit_is_strict_where_rows_hold_two_matrices_and_zero_alone() -> None:
    params = [PlanParam(name=f"w{i}", numel=4096, matrix=(64, 64), child="muon") for i in range(8)]
    limits: list[PlanMetrics] = [plan_domain(params, dp=dp).metrics() for dp in (1, 4, 8)]
    assert [each.row_over_largest for each in limits] == [8.0, 2.0, 1.0]
    assert limits[0].exchange_limit == 0.0
    assert limits[1].exchange_limit == 0.1
    assert limits[2].exchange_limit == pytest.approx(1 / 7 + 2 / 8, rel=1e-15)
