"""From rows to boxes of logical tensors: every logical element once, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing.runs import (
    Place,
    intersect,
    logical_parts,
    padding_inside,
    row_content,
    run_boxes,
)
from megatron_lw.optimizer.boxes import Box, BoxPair, stack_boxes, tensor_parallel_boxes
from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import PlanParam, plan_domain


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_of_a_run_are_the_run(shape, data):
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel() - 1))
    numel = data.draw(st.integers(0, whole.numel() - start))
    boxes = run_boxes(tuple(shape), start, numel)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [int(v) for box in boxes for v in part_of(whole, box).reshape(-1)]
    assert found == list(range(start, start + numel))


def test_boxes_share_what_both_hold():
    assert intersect(Box((0, 2), (4, 4)), Box((3, 0), (2, 3))) == Box((3, 2), (1, 1))
    assert intersect(Box((0,), (4,)), Box((4,), (2,))) is None
    assert intersect(Box((), ()), Box((), ())) == Box((), ())


def test_a_tensor_without_elements_has_no_part():
    box = Box((0, 0), (0, 7))
    place = Place(name="w", local_shape=(0, 7), pairs=(BoxPair(box, box),), shape=(0, 7))
    assert logical_parts(place, 0, 0) == ()
    assert padding_inside(place) == ()


def test_a_map_that_cuts_columns_is_cut_into_runs():
    """Local columns that lie apart in the logical tensor: every row gives a part for each."""
    pairs = (
        BoxPair(Box((0, 0), (3, 2)), Box((0, 4), (3, 2))),
        BoxPair(Box((0, 2), (3, 1)), Box((0, 0), (3, 1))),
    )
    place = Place(name="w", local_shape=(3, 3), pairs=pairs, shape=(3, 6))
    parts = logical_parts(place, 1, 6)
    assert [p.start for p in parts] == [1, 2, 3, 5, 6]
    assert [p.box for p in parts][:3] == [
        Box((0, 5), (1, 1)),
        Box((0, 0), (1, 1)),
        Box((1, 4), (1, 2)),
    ]


# name, logical shape, rows stored in all, divided dimension, blocks, ranks of a divided stack
PARAMS = (
    ("embedding", (37, 6), 40, 0, None, 1),
    ("gate_up", (16, 5), 16, 0, (8, 8), 1),
    ("qkv", (24, 6), 24, 0, (16, 4, 4), 1),
    ("proj", (7, 12), 7, 1, None, 1),
    ("norm", (9,), 9, None, None, 1),
    ("scale", (), None, None, None, 1),
    ("experts", (4, 8, 4), 4, 1, None, 2),
    ("conv", (5, 3, 2, 2), 5, None, None, 1),
)


def place_on(tp: int, t: int, stack: int, param: tuple) -> Place:
    name, shape, rows, dim, blocks, parts = param
    stored = shape if rows is None else (rows, *shape[1:])
    local = list(stored)
    if dim is not None:
        local[dim] //= tp
    if parts > 1:
        local[0] //= parts
    whole, pairs = tensor_parallel_boxes(name, tuple(local), dim, blocks, tp, t)
    if parts > 1:
        whole, pairs = stack_boxes(whole, pairs, parts, stack)
    assert whole == stored
    return Place(name=name, local_shape=tuple(local), pairs=pairs, shape=shape)


def local_tensor(place: Place) -> torch.Tensor:
    """What a rank stores: global element indices, and -1 in padding rows."""
    logical = torch.arange(math.prod(place.shape)).view(place.shape)
    local = torch.full(place.local_shape, -1, dtype=torch.int64)
    for pair in place.pairs:
        part = part_of(logical, pair.world)  # shorter where padding rows follow
        part_of(local, Box(pair.local.start, tuple(part.shape))).copy_(part)
    return local


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7, 16, 64])
@settings(deadline=None, max_examples=6)
@given(bucket_size=st.sampled_from([64, 200, 5000]), alignment=st.sampled_from([1, 16, 64]))
def test_rows_of_any_layout_tile_every_logical_tensor(dp, tp, bucket_size, alignment):
    """Value = global element index; each element on one rank, or on all where it is replicated."""
    seen = {p[0]: torch.zeros(p[1], dtype=torch.int64) for p in PARAMS}
    truth = {p[0]: torch.arange(math.prod(p[1])).view(p[1]) for p in PARAMS}
    padded = 0
    for t in range(tp):
        for stack in range(2):
            params = [p for p in PARAMS if p[5] == 2 or stack == 0]
            places = {p[0]: place_on(tp, t, stack, p) for p in params}
            plan = plan_domain(
                [
                    PlanParam(name=n, numel=math.prod(p.local_shape), child="adam")
                    for n, p in places.items()
                ],
                dp=dp,
                tp=tp,
                bucket_size=bucket_size,
                alignment=alignment,
            )
            for index in range(len(plan.buckets)):
                layout = BucketLayout.build(plan, index)
                names = [plan.params[i].name for i in layout.params]
                for row, length in enumerate(layout.row_lengths):
                    content = row_content(layout, row, [places[n] for n in names])
                    edges = sorted(
                        [(r.start, r.start + r.numel) for r in content.runs] + list(content.padding)
                    )
                    assert [e[0] for e in edges] == [0, *(e[1] for e in edges[:-1])]
                    assert edges[-1][1] == length
                    held = torch.full((length,), -1, dtype=torch.int64)
                    for slot in layout.slots[row]:
                        local = local_tensor(places[plan.params[slot.param].name]).view(-1)
                        held[slot.row_start : slot.row_start + slot.numel] = local[
                            slot.param_start : slot.param_start + slot.numel
                        ]
                    for start, stop in content.padding:
                        assert torch.all(held[start:stop] == -1)
                        padded += stop - start
                    for part in content.parts:
                        logical = part_of(truth[part.place.name], part.box).reshape(-1)
                        run = held[part.start : part.start + logical.numel()]
                        assert torch.equal(run, logical)
                        part_of(seen[part.place.name], part.box).add_(1)
    assert padded > 0
    for name, _, _, dim, _, parts in PARAMS:
        copies = tp if dim is None else 1
        assert torch.all(seen[name] == copies), (name, parts)
