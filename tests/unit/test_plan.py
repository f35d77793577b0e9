"""The plan of a domain: order, buckets, arrays, description. All comparisons are exact."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import OwnershipPlan, PlanParam, plan_domain


def matrix(name: str, rows: int, cols: int, **facts: Any) -> PlanParam:
    return PlanParam(name=name, numel=rows * cols, matrix=(rows, cols), child="muon", **facts)


def vector(name: str, numel: int, **facts: Any) -> PlanParam:
    return PlanParam(name=name, numel=numel, child="adam", **facts)


def model(layers: int = 12) -> list[PlanParam]:
    """A small decoder with everything that matters: groups, a tied embedding, chunks of its own."""
    params = [vector("embedding", 4000, tied="words", group="decay"), vector("output", 4000)]
    for layer in range(layers):
        chunk = 2 * layer // layers
        params += [
            matrix(f"layers.{layer}.qkv", 96, 64, chunk=chunk),
            matrix(f"layers.{layer}.proj", 64, 64, chunk=chunk),
            matrix(f"layers.{layer}.fc", 64, 128, chunk=chunk),
            vector(f"layers.{layer}.norm", 65, chunk=chunk, group="no_decay"),
            vector(f"layers.{layer}.bias", 64, chunk=chunk, group="decay"),
        ]
    return params


def names(plan: OwnershipPlan, bucket: int) -> list[str]:
    return [plan.params[index].name for index in plan.buckets[bucket].params]


def test_params_are_in_natural_order_whatever_the_registration() -> None:
    params = model()
    plan = plan_domain(params, dp=4)
    random.Random(0).shuffle(params)
    assert plan_domain(params, dp=4).digest() == plan.digest()
    layers = [param.name for param in plan.params if param.name.endswith(".norm")]
    assert layers == [f"layers.{layer}.norm" for layer in range(12)]


def test_a_bucket_has_one_chunk_one_child_and_one_tied_name() -> None:
    plan = plan_domain(model(), dp=4, bucket_size=20_000)
    assert len(plan.buckets) > 6
    seen: list[int] = []
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        for param in bucket.params:
            facts = plan.params[param]
            assert (facts.chunk, facts.child, facts.tied) == (
                bucket.chunk,
                bucket.child,
                bucket.tied,
            )
        seen.extend(bucket.params)
    assert sorted(seen) == list(range(len(plan.params)))


def test_buckets_are_in_the_order_in_which_backward_completes_them() -> None:
    plan = plan_domain(model(), dp=4, bucket_size=20_000)
    assert [bucket.chunk for bucket in plan.buckets] == sorted(
        (bucket.chunk for bucket in plan.buckets), reverse=True
    )
    last = [(-bucket.chunk, -min(bucket.params)) for bucket in plan.buckets]
    assert last == sorted(last)


def test_backward_order_can_be_given() -> None:
    params = [matrix(f"w{i}", 64, 64) for i in range(4)]
    reverse = plan_domain(params, dp=1, bucket_size=4096)
    assert [names(reverse, b) for b in range(4)] == [["w3"], ["w2"], ["w1"], ["w0"]]
    given = plan_domain(params, dp=1, bucket_size=4096, backward_order=["w1", "w3", "w0", "w2"])
    assert [names(given, b) for b in range(4)] == [["w1"], ["w3"], ["w0"], ["w2"]]
    assert given.digest() != reverse.digest()


@pytest.mark.parametrize("order", [["w0"], ["w0", "w0"], ["w0", "w1", "w2"]])
def test_backward_order_must_name_every_parameter_once(order: list[str]) -> None:
    params = [matrix("w0", 8, 8), matrix("w1", 8, 8)]
    with pytest.raises(ConfigError, match="backward_order must name every parameter once"):
        plan_domain(params, dp=1, backward_order=order)


def test_elementwise_buckets_are_laid_out_group_by_group() -> None:
    plan = plan_domain(model(), dp=4)
    (vectors,) = [b for b in plan.buckets if b.child == "adam" and b.chunk == 1]
    groups = [plan.params[index].group for index in vectors.params]
    assert groups == ["decay"] * 6 + ["no_decay"] * 6


def test_a_tied_parameter_has_the_same_bucket_on_both_stages() -> None:
    tied = vector("words", 1000, tied="words")
    first = plan_domain([tied, matrix("a", 33, 33), vector("b", 7)], dp=3)
    last = plan_domain([tied, matrix("z", 55, 55), vector("y", 70)], dp=3)
    layouts = []
    for plan in (first, last):
        (bucket,) = [b for b in plan.buckets if b.tied == "words"]
        layout = BucketLayout.build(plan, bucket.index)
        layouts.append((layout.row_lengths, layout.offsets, layout.padding))
    assert layouts[0] == layouts[1]


def test_an_embedding_closes_its_own_bucket_and_vectors_share_one() -> None:
    params = [vector("embedding", 10**8), vector("output", 10**8)]
    params += [vector(f"layers.{i}.norm", 4096) for i in range(40)]
    plan = plan_domain(params, dp=8)
    assert [len(bucket.params) for bucket in plan.buckets] == [1, 40, 1]


def test_a_large_stream_has_six_buckets_of_similar_size() -> None:
    params = [matrix(f"layers.{i}.w", 8192, 4096) for i in range(60)]
    plan = plan_domain(params, dp=64)
    assert len(plan.buckets) == 6
    assert {len(bucket.params) for bucket in plan.buckets} == {10}


def test_rows_hold_two_of_the_largest_matrix_where_six_buckets_allow() -> None:
    params = [matrix(f"layers.{i}.w", 8192, 4096) for i in range(600)]
    plan = plan_domain(params, dp=8)
    assert min(b.row_length for b in plan.buckets) >= 2 * 8192 * 4096
    assert len(plan.buckets) >= 6
    assert plan.metrics().matrices_whole_fraction == 1.0


def test_matrix_arrays_agree_with_the_layout() -> None:
    params = [*model(), matrix("stack", 32, 64, count=1)]
    params.append(
        PlanParam(name="experts", numel=5 * 48 * 32, matrix=(48, 32), count=5, child="muon")
    )
    plan = plan_domain(params, dp=5, bucket_size=30_000)
    offsets = {
        (bucket.index, param): offset
        for bucket in plan.buckets
        for param, offset in zip(
            bucket.params, BucketLayout.build(plan, bucket.index).offsets, strict=True
        )
    }
    expected = sum(param.count for param in plan.params if param.matrix)
    assert len(plan.owner) == expected == 42
    for unit in range(len(plan.owner)):
        param = plan.params[plan.matrix_param[unit]]
        assert param.matrix is not None
        rows, cols = param.matrix
        assert plan.matrix_numel[unit] == rows * cols
        assert plan.cost[unit] == max(rows, cols) * min(rows, cols) ** 2
        offset = offsets[int(plan.matrix_bucket[unit]), int(plan.matrix_param[unit])]
        assert plan.matrix_offset[unit] == offset + plan.matrix_start[unit]
    stack = plan.matrix_start[plan.matrix_param == plan.params.index(params[-1])]
    assert stack.tolist() == [0, 1536, 3072, 4608, 6144]


def test_pieces_agree_with_the_slots() -> None:
    plan = plan_domain(model(), dp=5, bucket_size=30_000)
    assert (np.bincount(plan.pieces.matrix) > 1).any()
    expected = {
        (slot.param, slot.row, slot.param_start, slot.numel)
        for bucket in plan.buckets
        if plan.is_matrix_bucket(bucket.index)
        for row in BucketLayout.build(plan, bucket.index).slots
        for slot in row
    }
    actual = zip(
        plan.matrix_param[plan.pieces.matrix].tolist(),
        plan.pieces.row.tolist(),
        plan.pieces.start.tolist(),
        plan.pieces.numel.tolist(),
        strict=True,
    )
    assert set(actual) == expected


def test_layers_that_fill_rows_never_move() -> None:
    plan = plan_domain(model(layers=16), dp=8)
    metrics = plan.metrics()
    assert metrics.matrices_whole_fraction == 1.0
    assert metrics.exchange_bytes == 0.0
    assert metrics.ns_makespan_over_bound == 1.0


def test_cost_is_an_argument() -> None:
    params = [matrix("a", 64, 64), matrix("b", 64, 64), matrix("c", 64, 128), matrix("d", 8, 8)]
    plan = plan_domain(params, dp=2, cost=lambda rows, cols: float(rows == cols == 8))
    assert plan.makespan == 1.0
    assert plan.cost.tolist().count(1.0) == 1


def test_arrays_are_read_only() -> None:
    plan = plan_domain(model(), dp=2)
    for array in (plan.owner, plan.cost, plan.loads, plan.matrix_start, plan.matrix_offset):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("dp", [1, 3])
def test_a_domain_may_be_empty_or_without_matrices(dp: int) -> None:
    empty = plan_domain([], dp=dp)
    assert (empty.buckets, empty.loads.tolist()) == ((), [0.0] * dp)
    plan = plan_domain([vector("b", 3), vector("none", 0)], dp=dp)
    assert [bucket.row_length for bucket in plan.buckets] == [64]
    for each in (empty, plan):
        metrics = each.metrics()
        assert (metrics.exchange_busiest, metrics.num_matrices) == (0.0, 0)
        assert metrics.row_over_largest == float("inf")
        assert each.digest() in each.describe()


def test_more_ranks_than_elements() -> None:
    plan = plan_domain([matrix("w", 1, 2)], dp=4)
    assert plan.buckets[0].row_length == 64
    assert plan.metrics().ranks_without_matrix == 3
    assert plan.owner.tolist() == [0]


def test_describe_has_a_line_for_every_bucket_and_the_promises() -> None:
    plan = plan_domain(model(), domain="dense", dp=4, bucket_size=20_000)
    text = plan.describe()
    lines = text.splitlines()
    table = lines[lines.index("") + 1 :]
    assert len(table[: table.index("")]) == 1 + len(plan.buckets)
    assert "plan of domain dense: 62 parameters" in text
    for word in ("padding", "Newton-Schulz", "exchange", "states", "peers"):
        assert word in text
    assert text.isascii()


def test_seventy_thousand_matrices_over_a_thousand_ranks() -> None:
    shapes = ((2048, 7168), (2048, 7168), (7168, 2048))
    params = [
        matrix(f"layers.{layer}.experts.{expert}.w{number}", *shape)
        for layer in range(91)
        for expert in range(257)  # a prime, so that nothing divides
        for number, shape in enumerate(shapes)
    ]
    assert len(params) == 70_161
    metrics = plan_domain(params, dp=1024).metrics()
    assert metrics.ns_makespan_over_bound <= max(1.05, metrics.ns_makespan_lpt_over_bound)
    assert 0 < metrics.exchange_busiest <= metrics.exchange_limit == 0.4 / 1024
