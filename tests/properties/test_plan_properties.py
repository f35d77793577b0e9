"""Properties of plan and layout over random models: placement, promises, determinism. All exact.

The examples are bounded in size so that the whole file takes seconds.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.names import natural_key
from megatron_lw.optimizer.owners import longest_first, lower_bound
from megatron_lw.optimizer.plan import OwnershipPlan, PlanParam, plan_domain

EXAMPLES = settings(max_examples=120, deadline=None)
SIDES = st.sampled_from([1, 3, 8, 16, 33, 64, 120, 256])


@st.composite
def params_of(draw: st.DrawFn, tp: int) -> list[PlanParam]:
    """A list of matrices, stacks and vectors that repeats a few shapes, as models do."""
    shapes = draw(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4))
    params = []
    for number in range(draw(st.integers(0, 40))):
        name = f"layers.{number}.{draw(st.sampled_from(['w', 'fc', 'norm']))}"
        chunk = draw(st.integers(0, 1))
        if draw(st.booleans()):
            rows, cols = draw(st.sampled_from(shapes))
            sharded = draw(st.booleans())
            rows = rows * tp if sharded else rows
            count = draw(st.sampled_from([1, 1, 1, 3]))
            params.append(
                PlanParam(
                    name=name,
                    numel=count * rows * cols // (tp if sharded else 1),
                    child=draw(st.sampled_from(["muon", "shampoo"])),
                    matrix=(rows, cols),
                    count=count,
                    chunk=chunk,
                    sharded=sharded,
                )
            )
        else:
            params.append(
                PlanParam(
                    name=name,
                    numel=draw(st.integers(0, 3000)),
                    child="adam",
                    chunk=chunk,
                    tied=draw(st.sampled_from([None, None, None, "words"])),
                    group=draw(st.sampled_from(["decay", "no_decay"])),
                )
            )
    return params


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[PlanParam], dict[str, Any]]:
    """Parameters and the sizes to plan them with."""
    tp = draw(st.integers(1, 4))
    sizes = {
        "dp": draw(st.integers(1, 64)),
        "tp": tp,
        "bucket_size": draw(st.one_of(st.none(), st.integers(1, 100_000))),
    }
    return draw(params_of(tp)), sizes


def layouts(plan: OwnershipPlan) -> list[BucketLayout]:
    return [BucketLayout.build(plan, bucket.index) for bucket in plan.buckets]


@given(calls())
@EXAMPLES
def test_every_element_lies_in_one_place(call: tuple[list[PlanParam], dict[str, Any]]) -> None:
    """Mark every element of every parameter and every offset of every bucket exactly once."""
    params, sizes = call
    plan = plan_domain(params, **sizes)
    marks = [np.zeros(param.numel, dtype=np.int8) for param in plan.params]
    for layout in layouts(plan):
        place = np.zeros(layout.numel, dtype=np.int8)
        for start, stop in layout.padding:
            place[start:stop] += 1
        for row, slots in enumerate(layout.slots):
            for slot in slots:
                marks[slot.param][slot.param_start : slot.param_start + slot.numel] += 1
                start = layout.row_starts[row] + slot.row_start
                place[start : start + slot.numel] += 1
        assert (place == 1).all()
        assert len(set(layout.row_lengths)) == 1
        assert all(offset % plan.alignment == 0 for offset in layout.offsets)
        assert all(length % plan.alignment == 0 for length in layout.row_lengths)
    assert all((mark == 1).all() for mark in marks)


@given(calls())
@EXAMPLES
def test_every_matrix_has_one_owner_and_lies_where_the_pieces_say(
    call: tuple[list[PlanParam], dict[str, Any]],
) -> None:
    params, sizes = call
    plan = plan_domain(params, **sizes)
    counts = np.bincount(plan.matrix_param, minlength=len(plan.params))
    assert counts.tolist() == [param.count if param.matrix else 0 for param in plan.params]
    assert ((plan.owner >= 0) & (plan.owner < plan.dp * plan.tp)).all()
    pieces = plan.pieces
    covered = np.bincount(pieces.matrix, weights=pieces.numel, minlength=len(plan.owner))
    assert covered.tolist() == plan.matrix_numel.tolist()
    lengths = np.array([bucket.row_length for bucket in plan.buckets], dtype=np.int64)
    length = lengths[plan.matrix_bucket[pieces.matrix]]
    low = plan.matrix_offset[pieces.matrix] + pieces.start
    assert (low // length == pieces.row).all()
    assert ((low + pieces.numel - 1) // length == pieces.row).all()
    loads = np.bincount(plan.owner, weights=plan.cost, minlength=plan.dp * plan.tp)
    assert loads.tolist() == plan.loads.tolist()


@given(calls())
@EXAMPLES
def test_promises(call: tuple[list[PlanParam], dict[str, Any]]) -> None:
    params, sizes = call
    plan = plan_domain(params, **sizes)
    metrics = plan.metrics()
    ranks = plan.dp * plan.tp
    costs = plan.cost.tolist()
    plain = np.bincount(longest_first(costs, ranks), weights=costs, minlength=ranks).max()
    assert plan.bound == lower_bound(costs, ranks)
    assert plan.bound <= plan.makespan <= max(1.05 * plan.bound, float(plain))
    assert 0 <= metrics.padding <= 64 * (plan.dp * len(plan.buckets) + len(params))
    assert metrics.tp_exchange_fraction <= (plan.tp - 1) / plan.tp
    if plan.dp == 1:
        assert metrics.exchange_busiest == 0
    elif costs:
        # The bound that holds for any list.
        largest = int(plan.matrix_numel.max())
        assert metrics.exchange_busiest <= 1 / (plan.dp - 1) + 2 * largest / metrics.numel
    # Rows are even in every bucket, so that padding is all that a rank has above its share.
    width = 4 + 8
    assert metrics.state_bytes * plan.dp <= _logical_state_bytes(plan) + metrics.padding * width


def _logical_state_bytes(plan: OwnershipPlan) -> int:
    return sum(param.numel * (8 if param.matrix else 12) for param in plan.params)


@given(calls(), st.randoms(use_true_random=False))
@EXAMPLES
def test_registration_order_changes_nothing(
    call: tuple[list[PlanParam], dict[str, Any]], rng: random.Random
) -> None:
    params, sizes = call
    shuffled = list(params)
    rng.shuffle(shuffled)
    plan, other = plan_domain(params, **sizes), plan_domain(shuffled, **sizes)
    assert plan.buckets == other.buckets
    assert plan.owner.tolist() == other.owner.tolist()
    assert plan.digest() == other.digest()
    assert layouts(plan) == layouts(other)


@given(calls(), st.data())
@EXAMPLES
def test_digest_sees_any_change(
    call: tuple[list[PlanParam], dict[str, Any]], data: st.DataObject
) -> None:
    params, sizes = call
    before = plan_domain(params, **sizes).digest()
    changed: dict[str, Any] = {"name": "other.name", "group": "other_group", "chunk": 2}
    for index in data.draw(st.sets(st.integers(0, len(params) - 1), max_size=3)) if params else ():
        field = data.draw(st.sampled_from(sorted(changed)))
        after = list(params)
        after[index] = dataclasses.replace(params[index], **{field: changed[field]})
        assert plan_domain(after, **sizes).digest() != before
        assert plan_domain(params[:index] + params[index + 1 :], **sizes).digest() != before
    assert plan_domain(params, **{**sizes, "dp": sizes["dp"] + 1}).digest() != before


@given(
    st.integers(2, 64),
    st.integers(1, 16),
    st.integers(1, 30),
    st.sampled_from([2.0, 3.5, 4.0]),
    st.booleans(),
)
@EXAMPLES
def test_decoders_keep_the_promises_that_the_plan_prints(
    dp: int, width: int, layers: int, ratio: float, with_output: bool
) -> None:
    hidden, ffn = 64 * width, int(64 * width * ratio)
    shapes = {"qkv": (hidden * 3 // 2, hidden), "proj": (hidden, hidden)}
    shapes |= {"fc1": (2 * ffn, hidden), "fc2": (hidden, ffn)}
    params = [
        PlanParam(name=f"layers.{layer}.{name}", numel=m * n, matrix=(m, n), child="muon")
        for layer in range(layers)
        for name, (m, n) in shapes.items()
    ]
    if with_output:
        params.append(PlanParam(name="output", numel=1000 * hidden, child="adam"))
    metrics = plan_domain(params, dp=dp).metrics()
    assert metrics.exchange_busiest <= metrics.exchange_limit
    if metrics.row_over_largest >= 2:
        assert metrics.exchange_limit == 0.4 / dp
    if metrics.numel >= 1e5 * dp:
        # 64 elements a row of each bucket: at the smallest size, 0.064 % a bucket.
        assert metrics.padding_fraction < 0.001 or metrics.num_buckets > 1
        assert metrics.padding_fraction <= 0.00064 * metrics.num_buckets
        assert metrics.memory_over_ideal <= 1.02


@given(st.lists(st.text(alphabet="a.0123456789_", max_size=8), max_size=12), st.randoms())
@EXAMPLES
def test_natural_order_is_total(names: list[str], rng: random.Random) -> None:
    shuffled = list(names)
    rng.shuffle(shuffled)
    assert sorted(shuffled, key=natural_key) == sorted(names, key=natural_key)
