"""From parameters to buckets: streams, closing, and the line of each bucket.

The decisions about sizes and orders are pure functions in `packing`; here they meet the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_lw.child_names import WHOLE_CHILDREN
from megatron_lw.optimizer import packing
from megatron_lw.optimizer.names import natural_key
from megatron_lw.optimizer.owners import whole_cost
from megatron_lw.optimizer.pieces import (
    FloatArray,
    IntArray,
    Pieces,
    cut_into_pieces,
    join_pieces,
)
from megatron_lw.optimizer.plan_params import PlanParam, PlanUnit

Cost = Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """One bucket.

    Attributes:
        index: Its place among the buckets, in the order in which backward completes them.
        chunk: Model chunk.
        child: Child optimizer that steps all of it.
        tied: Tied name, or None.
        params: Indices into `OwnershipPlan.params`, in the order in which they lie.
        row_length: Elements of each of the equal rows, a multiple of the alignment.
    """

    index: int
    chunk: int
    child: str
    tied: str | None
    params: tuple[int, ...]
    row_length: int


class Units(NamedTuple):
    """The units of a plan, [matrices] each: parameter, start in it, bucket, offset in it."""

    param: IntArray
    unit: IntArray
    start: IntArray
    numel: IntArray
    bucket: IntArray
    offset: IntArray
    cost: FloatArray


class Packed(NamedTuple):
    """Buckets with the order of their parameters, their matrices, and where those lie."""

    buckets: tuple[BucketPlan, ...]
    units: Units
    pieces: Pieces


def close_domain(
    ordered: Sequence[PlanParam],
    backward: Sequence[int],
    *,
    dp: int,
    bucket_size: int | None,
    alignment: int,
) -> list[list[int]]:
    """Divide the parameters into buckets, in the order in which backward completes them.

    Args:
        ordered: Parameters in canonical order.
        backward: Their indices in the order of backward.
        dp: Rows.
        bucket_size: Soft minimum in elements, or None.
        alignment: Elements to which a parameter is aligned.

    Returns:
        The indices of each bucket's parameters, in backward order.
    """
    closed: list[list[int]] = []
    for stream in _streams(ordered, backward):
        closed.extend(_close(ordered, stream, dp, bucket_size, alignment))
    place = {param: position for position, param in enumerate(backward)}
    # Backward runs through the chunks from the last to the first, and a bucket is complete with its
    # last.
    return sorted(
        closed, key=lambda bucket: (-ordered[bucket[0]].chunk, max(place[i] for i in bucket))
    )


def _streams(ordered: Sequence[PlanParam], backward: Sequence[int]) -> Iterable[list[int]]:
    """Return each stream, (chunk, child, tied), in backward order; no two share a bucket."""
    streams: dict[tuple[int, str, str | None], list[int]] = {}
    for index in backward:
        param = ordered[index]
        streams.setdefault((param.chunk, param.child, param.tied), []).append(index)
    return streams.values()


def _close(
    ordered: Sequence[PlanParam],
    stream: list[int],
    dp: int,
    bucket_size: int | None,
    alignment: int,
) -> list[list[int]]:
    """Cut a stream into buckets."""
    first = ordered[stream[0]]
    if first.tied is not None:
        return [stream]
    sizes = [packing.round_up(ordered[index].numel, alignment) for index in stream]
    if first.matrix is None:
        minimum = bucket_size or packing.default_floor(dp)
        groups = packing.close_elementwise_buckets(sizes, minimum)
        return [[stream[place] for place in group] for group in groups]
    largest = max(ordered[index].numel // ordered[index].count for index in stream)
    rule = packing.matrix_closing_rule(sum(sizes), largest, dp, bucket_size)
    ends = packing.close_matrix_buckets(sizes, rows=dp, rule=rule)
    return [stream[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def pack_domain(
    ordered: Sequence[PlanParam],
    closed: Sequence[list[int]],
    *,
    dp: int,
    alignment: int,
    cost: Cost,
) -> Packed:
    """Lay every bucket out, carrying the rows' Newton-Schulz loads from bucket to bucket.

    Args:
        ordered: Parameters in canonical order.
        closed: The parameters of each bucket, from `close_domain`.
        dp: Rows.
        alignment: Elements to which parameters and rows are aligned.
        cost: Cost of orthogonalising one global matrix.
    """
    row_loads = np.zeros(dp)
    buckets: list[BucketPlan] = []
    units: list[Units] = []
    pieces: list[Pieces] = []
    for index, members in enumerate(closed):
        first = ordered[members[0]]
        sizes = [packing.round_up(ordered[member].numel, alignment) for member in members]
        row_length = packing.even_row_length(sum(sizes), dp, alignment)
        if first.matrix is None:
            order = _by_group(ordered, members)
        else:
            costs = [_cost_of(ordered[member], cost) for member in members]
            packed = packing.pack_rows(sizes, costs, row_length=row_length, row_loads=row_loads)
            order = [members[place] for place in packed]
        units.append(_units(ordered, order, index, alignment, cost))
        pieces.append(cut_into_pieces(units[-1].offset, units[-1].numel, row_length))
        row_loads += _row_loads(units[-1], pieces[-1], dp)
        buckets.append(
            BucketPlan(
                index=index,
                chunk=first.chunk,
                child=first.child,
                tied=first.tied,
                params=tuple(order),
                row_length=row_length,
            )
        )
    counts = [len(each.cost) for each in units]
    return Packed(tuple(buckets), _join_units(units), join_pieces(pieces, counts))


def _by_group(ordered: Sequence[PlanParam], members: Sequence[int]) -> list[int]:
    """Sort by parameter group, then backward order, so that each group is one flat run."""
    return sorted(members, key=lambda member: natural_key(ordered[member].group))


def _cost_of(param: PlanParam, cost: Cost) -> float:
    """Return the cost of all matrices of a parameter; 0 for an element-wise one."""
    return param.count * sum(_unit_cost(param, unit, cost) for unit in param.owned_units)


def _unit_cost(param: PlanParam, unit: PlanUnit, cost: Cost) -> float:
    if param.child in WHOLE_CHILDREN:
        return sum(whole_cost(param.child, *shape) for shape in unit.matrices)
    return sum(cost(*shape) for shape in unit.matrices)


def _units(
    ordered: Sequence[PlanParam], order: Sequence[int], bucket: int, alignment: int, cost: Cost
) -> Units:
    """List the units of a bucket; none where it is element-wise."""
    line = packing.lay_line([ordered[index].numel for index in order], alignment)
    rows: list[tuple[int, int, int, int, int, int]] = []
    costs: list[float] = []
    for index, offset in zip(order, line.offsets, strict=True):
        param = ordered[index]
        if param.matrix is None:
            continue
        stored = param.numel // param.count
        found = [
            (number, unit.start * stored // param.matrix[0], unit.rows * stored // param.matrix[0])
            for number, unit in enumerate(param.owned_units)
        ]
        for first in range(0, param.numel, stored):
            rows.extend(
                (index, unit, first + start, numel, bucket, offset + first + start)
                for unit, start, numel in found
            )
        costs.extend([_unit_cost(param, unit, cost) for unit in param.owned_units] * param.count)
    of, unit, start, numel_column, bucket_column, place = (
        np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy()
    )
    cost_column = np.array(costs, dtype=np.float64)
    return Units(of, unit, start, numel_column, bucket_column, place, cost_column)


def _row_loads(units: Units, pieces: Pieces, dp: int) -> FloatArray:
    """Return the [rows] costs of a bucket, each matrix counted at the row that holds most of it."""
    loads = np.zeros(dp)
    # By matrix, then the smallest piece first, so that the last of a matrix is its largest.
    by_size = np.lexsort((-pieces.row, pieces.numel, pieces.matrix))
    last = np.searchsorted(pieces.matrix, np.arange(len(units.cost)), side="right") - 1
    np.add.at(loads, pieces.row[by_size[last]], units.cost)
    return loads


def _join_units(units: Sequence[Units]) -> Units:
    empty = np.zeros(0, dtype=np.int64)
    first = Units(empty, empty, empty, empty, empty, empty, np.zeros(0))
    return Units(*(np.concatenate(columns) for columns in zip(first, *units, strict=True)))
