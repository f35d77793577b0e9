"""From a row to boxes of logical tensors: which elements a rank holds, in the terms of the model.

A row holds flat runs of local tensors. A run is cut into boxes of the local tensor, each contiguous
in the row, and every box is mapped to the logical tensor; what lies beyond the logical tensor is
declared padding. Pure functions on integers, used for saving, loading and planning alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lw.dist_checkpointing.manifest import Run
from megatron_lw.optimizer.boxes import Box, BoxPair
from megatron_lw.optimizer.layout import BucketLayout

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank's part of a parameter lies in the logical tensor.

    Attributes:
        name: identity of the parameter.
        local_shape: what the rank stores, padding rows included.
        pairs: which local box is which box of the whole parameter, padding rows included; they
            tile the local tensor.
        shape: logical shape; what lies beyond it is padding.
    """

    name: str
    local_shape: Shape
    pairs: tuple[BoxPair, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous run of a flattened local tensor and the logical box that it is.

    Attributes:
        start: first element in the flattened local tensor.
        box: the part of the logical tensor, in row-major order.
    """

    start: int
    box: Box

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.box.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """A part of a logical tensor that lies in a row.

    Attributes:
        place: the parameter.
        start: first element in the row.
        box: the part of the logical tensor.
    """

    place: Place
    start: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContent:
    """What one row of a bucket holds.

    Attributes:
        parts: logical parts, in the order in which they lie.
        runs: the same by parameter.
        padding: declared padding as (start, stop), ascending.
    """

    parts: tuple[RowPart, ...]
    runs: tuple[Run, ...]
    padding: tuple[tuple[int, int], ...]


def row_content(layout: BucketLayout, row: int, places: Sequence[Place]) -> RowContent:
    """Find what a row holds.

    Args:
        layout: the bucket.
        row: which row.
        places: for each of `layout.params` where it lies in its logical tensor.
    """
    place_of = dict(zip(layout.params, places, strict=True))
    parts: list[RowPart] = []
    runs: list[Run] = []
    padding = list(layout.padding_in_row(row))
    for slot in layout.slots[row]:
        place, shift = place_of[slot.param], slot.row_start - slot.param_start
        found = logical_parts(place, slot.param_start, slot.numel)
        parts += [RowPart(place=place, start=p.start + shift, box=p.box) for p in found]
        stop = slot.param_start + slot.numel
        inside = [
            (max(low, slot.param_start) + shift, min(high, stop) + shift)
            for low, high in padding_inside(place)
            if low < stop and high > slot.param_start
        ]
        padding += inside
        edges = [slot.row_start, *(edge for gap in inside for edge in gap), stop + shift]
        runs += [
            Run(name=place.name, start=low, numel=high - low)
            for low, high in zip(edges[::2], edges[1::2], strict=True)
            if low < high
        ]
    return RowContent(parts=tuple(parts), runs=tuple(runs), padding=tuple(sorted(padding)))


def logical_parts(place: Place, start: int, numel: int) -> tuple[Part, ...]:
    """Cut a run of a flattened local tensor into boxes of its logical tensor, padding left out.

    Args:
        place: where the local tensor lies.
        start: first element of the run.
        numel: elements of the run.

    Returns:
        Parts in ascending order of `start`, each contiguous in the run.
    """
    found = [
        Part(_offset(local, place.local_shape), Box(_moved(local.start, pair), local.shape))
        for box in run_boxes(place.local_shape, start, numel)
        for pair in place.pairs
        for common in _overlap(box, _logical_half(pair, place.shape))
        for local in _contiguous(common, place.local_shape)
    ]
    return tuple(sorted(found, key=lambda part: part.start))


def padding_inside(place: Place) -> tuple[tuple[int, int], ...]:
    """Runs of a flattened local tensor that lie beyond the logical rows, ascending.

    Padding rows follow the logical ones; a rank may hold nothing else.
    """
    if not place.local_shape:
        return ()
    inner = math.prod(place.local_shape[1:])
    found = []
    for pair in place.pairs:
        rows = pair.local.shape[0]
        kept = min(rows, max(0, place.shape[0] - pair.world.start[0]))
        if kept < rows:
            first = pair.local.start[0]
            found.append(((first + kept) * inner, (first + rows) * inner))
    return tuple(sorted(gap for gap in found if gap[0] < gap[1]))


def run_boxes(shape: Shape, start: int, numel: int) -> tuple[Box, ...]:
    """Cut a run of a flattened tensor into boxes, at most `2 * ndim - 1` of them, in order.

    Args:
        shape: of the tensor, row-major.
        start: first element of the run.
        numel: elements of the run.
    """
    return tuple(_run_boxes(shape, start, start + numel))


def intersect(one: Box, other: Box) -> Box | None:
    """The common part of two boxes; None if they share no element."""
    start = tuple(max(a, b) for a, b in zip(one.start, other.start, strict=True))
    stop = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )
    if any(low >= high for low, high in zip(start, stop, strict=True)):
        return None
    return Box(start, tuple(high - low for low, high in zip(start, stop, strict=True)))


def _run_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from _below(first, _run_boxes(shape[1:], head, tail))
        return
    if head:
        yield from _below(first, _run_boxes(shape[1:], head, inner))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        yield from _below(last, _run_boxes(shape[1:], 0, tail))


def _below(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    """Boxes of the tensor at one index of the first dimension, as boxes of the whole."""
    for box in boxes:
        yield Box((index, *box.start), (1, *box.shape))


def _logical_half(pair: BoxPair, shape: Shape) -> Box:
    """The local box of a pair without its padding rows."""
    if not shape:
        return pair.local
    rows = min(pair.local.shape[0], max(0, shape[0] - pair.world.start[0]))
    return Box(pair.local.start, (rows, *pair.local.shape[1:]))


def _overlap(one: Box, other: Box) -> Iterator[Box]:
    common = intersect(one, other)
    if common is not None:
        yield common


def _contiguous(box: Box, shape: Shape) -> Iterator[Box]:
    """Divide a box into boxes that are contiguous in a row-major tensor."""
    free = next((d for d, n in enumerate(box.shape) if n > 1), len(shape))
    if all(box.shape[d] == shape[d] for d in range(free + 1, len(shape))):
        yield box
        return
    for index in range(box.shape[free]):
        start = (*box.start[:free], box.start[free] + index, *box.start[free + 1 :])
        yield from _contiguous(Box(start, (*box.shape[:free], 1, *box.shape[free + 1 :])), shape)


def _offset(box: Box, shape: Shape) -> int:
    """Place of a box's first element in the flattened tensor."""
    offset = 0
    for at, size in zip(box.start, shape, strict=True):
        offset = offset * size + at
    return offset


def _moved(start: Shape, pair: BoxPair) -> Shape:
    return tuple(
        at - low + world
        for at, low, world in zip(start, pair.local.start, pair.world.start, strict=True)
    )
