"""Where the matrices of a domain lie, and what the exchange moves.

A *piece* is the part of a matrix that one row holds. Arrays of integers, one entry a piece, ordered
by matrix, then by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Where the matrices lie: one entry for each matrix and row that it touches.

    Attributes:
        matrix: [pieces] index of the matrix.
        row: [pieces] row that holds the piece.
        start: [pieces] offset in the local elements of the matrix.
        numel: [pieces] local elements.
    """

    matrix: IntArray
    row: IntArray
    start: IntArray
    numel: IntArray


class Sent(NamedTuple):
    """Elements that each rank sends in the exchange of a step, [ranks] each.

    Attributes:
        between: To other rows, both ways: the data-parallel exchange.
        within_out: To owners in the same row: the tensor-parallel exchange, pieces on their way
            out.
        within_back: Updates back to the ranks of the same row.
    """

    between: FloatArray
    within_out: FloatArray
    within_back: FloatArray


def cut_into_pieces(starts: IntArray, numels: IntArray, row_length: int) -> Pieces:
    """Cut the matrices of a bucket at its row ends.

    Args:
        starts: [matrices] offset in the bucket.
        numels: [matrices] local elements, at least 1.
        row_length: Elements of a row.
    """
    first = starts // row_length
    counts = (starts + numels - 1) // row_length - first + 1
    matrix = np.repeat(np.arange(len(starts), dtype=np.int64), counts)
    row = np.arange(len(matrix), dtype=np.int64) + np.repeat(
        first - np.cumsum(counts) + counts, counts
    )
    low = np.maximum(starts[matrix], row * row_length)
    high = np.minimum((starts + numels)[matrix], (row + 1) * row_length)
    return Pieces(matrix=matrix, row=row, start=low - starts[matrix], numel=high - low)


def join_pieces(buckets: Sequence[Pieces], counts: Sequence[int]) -> Pieces:
    """Join the pieces of buckets with `counts` matrices each, numbered through."""
    empty = np.zeros(0, dtype=np.int64)
    bases = np.cumsum([0, *counts])[:-1]
    return Pieces(
        matrix=np.concatenate(
            [empty, *(b.matrix + base for b, base in zip(buckets, bases, strict=True))]
        ),
        row=np.concatenate([empty, *(b.row for b in buckets)]),
        start=np.concatenate([empty, *(b.start for b in buckets)]),
        numel=np.concatenate([empty, *(b.numel for b in buckets)]),
    )


def sum_by_rank(rank: IntArray, amount: FloatArray, ranks: int) -> FloatArray:
    """Return [ranks] the sum of `amount` over equal entries of `rank`."""
    return np.bincount(rank, weights=amount, minlength=ranks).astype(np.float64)


def count_sent(owner: IntArray, pieces: Pieces, sharded: BoolArray, *, dp: int, tp: int) -> Sent:
    """Count the elements that each rank sends in the exchange, to the owners and back.

    Two stages, so that no matrix crosses rows more than once: between rows, every piece goes to the
    rank of the owner's row with the same tensor-parallel index (of a replicated matrix only from
    the owner's index); within that row, to the owner. The update comes back the same way.

    Args:
        owner: [matrices] rank, `row * tp + t`.
        pieces: Where the matrices lie.
        sharded: [matrices] true where tensor parallelism cuts the matrix.
        dp: Rows.
        tp: Tensor-parallel ranks of a row.
    """
    ranks = dp * tp
    target = owner[pieces.matrix]
    away = pieces.row != target // tp
    cut = sharded[pieces.matrix]
    size = pieces.numel.astype(np.float64)
    within_back = sum_by_rank(target, size * (tp - 1), ranks)
    between, within_out = np.zeros(ranks), np.zeros(ranks)
    for t in range(tp):
        relay = target - target % tp + t
        out = away & (cut | (target % tp == t))
        between += sum_by_rank(pieces.row * tp + t, size * out, ranks)
        between += sum_by_rank(relay, size * away, ranks)
        within_out += sum_by_rank(relay, size * (cut & (relay != target)), ranks)
    return Sent(between, within_out, within_back)


def count_peers(owner: IntArray, pieces: Pieces, *, dp: int, tp: int) -> IntArray:
    """Return [ranks] how many other ranks each exchanges with: owner, relay or holder."""
    ranks = dp * tp
    target = owner[pieces.matrix]
    pairs = [np.zeros(0, dtype=np.int64)]
    for t in range(tp):
        holder, relay = pieces.row * tp + t, target - target % tp + t
        for one, other in ((holder, relay), (relay, target)):
            apart = one != other
            pairs.append(one[apart] * ranks + other[apart])
            pairs.append(other[apart] * ranks + one[apart])
    unique = np.unique(np.concatenate(pairs))
    return np.bincount(unique // ranks, minlength=ranks).astype(np.int64)
