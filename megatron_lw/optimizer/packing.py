"""Where parameters go: canonical order, bucket closing, packing of a bucket into equal rows.

Pure functions of integers; every rank computes the same answer from the same facts. A *line* is the
sequence of parameters of one bucket, each starting at a multiple of the alignment; it is cut into
`rows` equal rows. Any order of the line is a valid layout, so the heuristics here only decide how
many matrices a row end cuts, never whether the result is right.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_lw.errors import ConfigError

# Missing the target size by a share of it weighs this much against leaving that share of a bucket
# unable to fill rows with whole matrices: a cut costs traffic at every step, a larger bucket a
# little overlap.
_SIZE_WEIGHT = 0.2


class Line(NamedTuple):
    """Offsets of consecutive parameters and the aligned end of the last one, in elements."""

    offsets: tuple[int, ...]
    end: int


class ClosingRule(NamedTuple):
    """Bucket sizes in elements: the one aimed at, the least and the most that is accepted."""

    target: int
    minimum: int
    maximum: int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value` (zero stays zero).

    Raises:
        ConfigError: If `value` is negative or `multiple` is below 1.
    """
    if value < 0 or multiple < 1:
        raise ConfigError(
            f"cannot round {value} up to a multiple of {multiple}: need value >= 0, multiple >= 1"
        )
    return -(-value // multiple) * multiple


def lay_line(numels: Sequence[int], alignment: int) -> Line:
    """Lay parameters of `numels` elements one after another, starts aligned."""
    offsets: list[int] = []
    cursor = 0
    for numel in numels:
        offsets.append(cursor)
        cursor += round_up(numel, alignment)
    return Line(tuple(offsets), cursor)


def even_row_length(end: int, rows: int, alignment: int) -> int:
    """Return the length of each of `rows` equal aligned rows that together hold `end` elements.

    A bucket of empty parameters still gets one aligned unit a row, so that no collective sees an
    empty tensor.
    """
    return max(alignment, round_up(-(-end // rows), alignment))


def default_floor(dp: int) -> int:
    """Return the least default bucket size in elements: 40 M, or 1 M a rank, as Megatron has it."""
    return max(40_000_000, 1_000_000 * dp)


def matrix_closing_rule(total: int, largest: int, dp: int, bucket_size: int | None) -> ClosingRule:
    """Decide how large the buckets of a stream of matrices are.

    By default a bucket is the smallest whose rows hold two of the largest matrix, at least the
    floor, and at most a sixth of the stream, so that six buckets can overlap with backward. Where
    rows of two largest matrices are in reach they are a hard minimum, as the low-exchange promise
    rests on them; a larger bucket, up to a sixth of the stream, is taken if its rows fill with
    whole matrices.

    Args:
        total: Aligned elements of the stream on one rank.
        largest: Elements of its largest matrix on one rank.
        dp: Number of rows.
        bucket_size: The caller's soft minimum in elements, or None for the default.
    """
    if bucket_size is not None:
        target = total // max(1, total // bucket_size)
        return ClosingRule(target, bucket_size, max(target * 5 // 4, bucket_size))
    two_largest, sixth = 2 * dp * largest, total // 6
    size = max(default_floor(dp), min(two_largest, sixth))
    target = total // max(1, total // size)
    minimum = size if two_largest <= size else target * 9 // 10
    return ClosingRule(target, minimum, max(target * 11 // 10, min(2 * target, sixth)))


def close_matrix_buckets(sizes: Sequence[int], *, rows: int, rule: ClosingRule) -> list[int]:
    """Cut a stream of matrices, given in backward order, into buckets.

    A bucket whose every size class counts a multiple of `rows` can be packed without a cut, so
    among the closing places that `rule` allows the one is taken that leaves the smallest share
    outside such multiples, weighed against its distance from an even share of what remains. No
    remainder is shorter than the minimum.

    Args:
        sizes: Aligned elements of each parameter.
        rows: Number of rows of a bucket.
        rule: The sizes to aim at.

    Returns:
        The end (exclusive index into `sizes`) of each bucket; the last is `len(sizes)`.
    """
    ends: list[int] = []
    start, remaining = 0, sum(sizes)
    while start < len(sizes):
        end, size = _next_closing(sizes, start, remaining, rows, rule)
        ends.append(end)
        start, remaining = end, remaining - size
    return ends


def _next_closing(
    sizes: Sequence[int], start: int, remaining: int, rows: int, rule: ClosingRule
) -> tuple[int, int]:
    """Return the end and the size of the bucket that starts at `start`."""
    share = remaining / max(1, round(remaining / max(1, rule.target)))
    counts: defaultdict[int, int] = defaultdict(int)
    best = (float("inf"), len(sizes), remaining)
    size = unfilled = 0
    for index in range(start, len(sizes)):
        item = sizes[index]
        size += item
        if size > rule.maximum and best[0] < float("inf"):
            break
        counts[item] = (counts[item] + 1) % rows
        unfilled += item if counts[item] else item - rows * item
        rest = remaining - size
        if size >= rule.minimum and (rest == 0 or rest >= rule.minimum):
            score = unfilled / size + _SIZE_WEIGHT * abs(size - share) / share
            best = min(best, (score, index + 1, size))
    return best[1:]


def close_elementwise_buckets(sizes: Sequence[int], minimum: int) -> list[list[int]]:
    """Cut a stream of element-wise parameters, given in backward order, into buckets.

    A parameter of `minimum` elements or more (an embedding, an output layer) has a bucket of its
    own, so that its reduction does not wait for the vectors of all layers; the rest fill buckets of
    an even share of at least `minimum`, usually one.

    Returns:
        The indices into `sizes` of each bucket, in backward order.
    """
    buckets = [[index] for index, size in enumerate(sizes) if size >= minimum]
    small = [index for index, size in enumerate(sizes) if size < minimum]
    remaining = sum(sizes[index] for index in small)
    number = max(1, remaining // max(1, minimum))
    current: list[int] = []
    filled = 0
    for index in small:
        current.append(index)
        filled += sizes[index]
        if number > 1 and filled >= remaining / number:
            buckets.append(current)
            remaining, number, filled, current = remaining - filled, number - 1, 0, []
    return [*buckets, current] if current else buckets


def pack_rows(
    sizes: Sequence[int], costs: Sequence[float], *, row_length: int, row_loads: np.ndarray
) -> list[int]:
    """Order a bucket of matrices so that its row ends cut few and small ones.

    Longest first, each matrix goes whole to the row with the least cumulative Newton-Schulz load
    that has space for all of it; then the line is built from these blocks, and the matrices that
    fit nowhere bridge the row ends.

    Args:
        sizes: Aligned elements of each parameter; their sum fits the rows.
        costs: Newton-Schulz cost of each parameter.
        row_length: Elements of a row.
        row_loads: [rows] cost that each row has from earlier buckets; left as it is.

    Returns:
        The order in which the parameters lie, as indices into `sizes`.
    """
    blocks, leftovers = _fill_rows(sizes, costs, row_length, row_loads)
    return _build_line(sizes, blocks, leftovers, row_length)


def _fill_rows(
    sizes: Sequence[int], costs: Sequence[float], row_length: int, row_loads: np.ndarray
) -> tuple[list[list[int]], list[int]]:
    """Place whole matrices in rows, longest first; return the blocks and what fits nowhere."""
    rows = len(row_loads)
    loads = row_loads.astype(np.float64)
    space = np.full(rows, row_length, dtype=np.int64)
    blocks: list[list[int]] = [[] for _ in range(rows)]
    leftovers: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-costs[i], -sizes[i], i)):
        candidates = np.where(space >= sizes[index], loads, np.inf)
        row = int(candidates.argmin())
        if candidates[row] == np.inf:
            leftovers.append(index)
            continue
        blocks[row].append(index)
        loads[row] += costs[index]
        space[row] -= sizes[index]
    return blocks, leftovers


class _Pool:
    """Matrices without a row, sorted by size."""

    def __init__(self, sizes: Sequence[int], members: Sequence[int]) -> None:
        self._entries = sorted((sizes[index], index) for index in members)

    def add(self, size: int, index: int) -> None:
        """Put a matrix into the pool."""
        bisect.insort(self._entries, (size, index))

    def take_largest_within(self, space: int) -> int | None:
        """Take out the largest matrix of at most `space` elements; None if there is none."""
        place = bisect.bisect_right(self._entries, (space, np.iinfo(np.int64).max))
        return self._entries.pop(place - 1)[1] if place else None

    def take_smallest_beyond(self, space: int) -> int | None:
        """Take out the smallest matrix of more than `space` elements; None if there is none."""
        place = bisect.bisect_right(self._entries, (space, np.iinfo(np.int64).max))
        return self._entries.pop(place)[1] if place < len(self._entries) else None

    def drain(self) -> list[int]:
        """Take out everything, smallest first."""
        entries, self._entries = self._entries, []
        return [index for _, index in entries]


def _build_line(
    sizes: Sequence[int], blocks: list[list[int]], leftovers: list[int], row_length: int
) -> list[int]:
    """Concatenate the rows' blocks, bridging row ends with the smallest leftovers."""
    order: list[int] = []
    pool = _Pool(sizes, leftovers)
    cursor = 0
    for row, block in enumerate(blocks):
        row_end = (row + 1) * row_length
        kept = _make_room(sizes, block, row_end - cursor, pool)
        order.extend(kept)
        cursor += sum(sizes[index] for index in kept)
        cursor = _bridge(sizes, order, cursor, row_end, pool)
    return order + pool.drain()


def _make_room(sizes: Sequence[int], block: list[int], space: int, pool: _Pool) -> list[int]:
    """Return what of a row's block fits `space`; the smallest that suffice go to the pool."""
    kept = sorted(block, key=lambda i: (sizes[i], i))
    excess = sum(sizes[index] for index in kept) - max(0, space)
    while excess > 0:
        place = bisect.bisect_left(kept, excess, key=lambda i: sizes[i])
        index = kept.pop(min(place, len(kept) - 1))
        pool.add(sizes[index], index)
        excess -= sizes[index]
    return kept


def _bridge(sizes: Sequence[int], order: list[int], cursor: int, row_end: int, pool: _Pool) -> int:
    """Fill up to `row_end`: whole matrices first, then the smallest that crosses it."""
    while cursor < row_end:
        index = pool.take_largest_within(row_end - cursor)
        if index is None:
            index = pool.take_smallest_beyond(row_end - cursor)
        if index is None:
            return cursor
        order.append(index)
        cursor += sizes[index]
    return cursor
