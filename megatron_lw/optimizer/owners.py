"""Who orthogonalises which matrix: balanced by Newton-Schulz cost, and by preference where it lies.

What is stepped whole by an optimizer that keeps its state at the owner is balanced by that state.

Pure functions. A *rank* here is a rank of the tensor-parallel x data-parallel group, `row * tp +
t`. The balance problem is scheduling on identical machines; longest-first is Graham's LPT rule (R.
L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_lw.optimizer.pieces import (
    BoolArray,
    FloatArray,
    IntArray,
    Pieces,
    count_sent,
    sum_by_rank,
)

# The makespan that is promised is this times the lower bound, or plain longest-first where that is
# more.
SLACK = 1.05
# The same of what is balanced by memory: states may be that much above an even share.
MEMORY_SLACK = 1.02

# Loads of costs that are not integers depend in the last bits on the order in which they are added.
_ROUNDING = 1e-12


def newton_schulz_cost(rows: int, cols: int) -> int:
    """Return the relative cost of orthogonalising one `rows` x `cols` matrix: max * min^2.

    One Newton-Schulz iteration multiplies [min, max] by [max, min] and two more of that order, so
    time goes as max * min^2 and not as the number of elements.
    """
    return max(rows, cols) * min(rows, cols) ** 2


def whole_cost(child: str, rows: int, cols: int) -> int:
    """Return what a matrix weighs at an owner that steps it whole: elements of state kept there.

    SOAP keeps two moments, and two square matrices for each side. Of other optimizers no more is
    known than that state and time mostly go as the number of elements.

    Args:
        child: One of `WHOLE_CHILDREN`.
        rows: Of the whole matrix.
        cols: The same.
    """
    if child == "soap":
        return 2 * (rows * cols + rows**2 + cols**2)
    return rows * cols


class Ownership(NamedTuple):
    """An assignment of matrices to ranks.

    Attributes:
        owner: [matrices] rank.
        loads: [ranks] cost of what each rank owns.
        bound: Lower bound of the makespan of any assignment.
        lpt_makespan: Makespan of plain longest-first.
    """

    owner: IntArray
    loads: FloatArray
    bound: float
    lpt_makespan: float


def lower_bound(costs: Sequence[float], ranks: int) -> float:
    """Return a lower bound of the makespan: no assignment of `costs` to `ranks` does better.

    The maximum of the average, the largest, and for every k the sum of the k + 1 smallest among the
    k * ranks + 1 largest: by the pigeonhole principle one rank gets k + 1 of those.
    """
    if not costs:
        return 0.0
    ordered = sorted(costs, reverse=True)
    prefix = [0.0]
    for cost in ordered:
        prefix.append(prefix[-1] + cost)
    best = prefix[-1] / ranks
    for k in range((len(ordered) - 1) // ranks + 1):
        end = k * ranks + 1
        best = max(best, prefix[end] - prefix[end - k - 1])
    return best


def longest_first(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign costs, largest first, each to the least loaded rank (LPT); return the rank of each."""
    heap = [(0.0, rank) for rank in range(ranks)]
    owner = [0] * len(costs)
    for index in _by_cost(costs):
        load, rank = heap[0]
        owner[index] = rank
        heapq.heapreplace(heap, (load + costs[index], rank))
    return owner


def loads_of(costs: Sequence[float], owner: Sequence[int] | IntArray, ranks: int) -> FloatArray:
    """Return the [ranks] sums of the costs that each rank owns."""
    rank = np.asarray(owner, dtype=np.int64)
    return sum_by_rank(rank, np.asarray(costs, dtype=np.float64), ranks)


def assign_owners(
    costs: Sequence[float],
    pieces: Pieces,
    sharded: BoolArray,
    *,
    dp: int,
    tp: int,
    slack: float = SLACK,
) -> Ownership:
    """Give every matrix of a domain one owner.

    Several assignments are tried: holders first up to a target load, and plain longest-first with
    matrices of equal cost matched to their holders. Of those whose makespan keeps the promise
    (`slack` times the bound, or longest-first's where that is more) the one is taken whose busiest
    rank sends least in the exchange; longest-first always qualifies.

    Args:
        costs: Cost of each matrix, from its global shape.
        pieces: Where the matrices lie.
        sharded: [matrices] true where tensor parallelism cuts the matrix, false where it replicates
            it.
        dp: Rows.
        tp: Tensor-parallel ranks of a row.
        slack: How far above the bound the makespan may be.
    """
    ranks = dp * tp
    bound = lower_bound(costs, ranks)
    plain = longest_first(costs, ranks)
    lpt_makespan = float(loads_of(costs, plain, ranks).max())
    limit = max(slack * bound, lpt_makespan)
    holders = _holders(pieces, len(costs))
    assignments = [_match_to_holders(costs, holders, plain, tp)]
    for target in (limit, bound):
        assignments.append(_prefer_holders(costs, holders, target, ranks=ranks, tp=tp))
    best: tuple[float, float, int] | None = None
    for number, assignment in enumerate(assignments):
        makespan = float(loads_of(costs, assignment, ranks).max())
        sent = count_sent(np.asarray(assignment, dtype=np.int64), pieces, sharded, dp=dp, tp=tp)
        score = (float(sent.between.max()), makespan, number)
        if makespan <= limit * (1 + _ROUNDING) and (best is None or score < best):
            best = score
    owner = np.asarray(assignments[0 if best is None else best[2]], dtype=np.int64)
    return Ownership(owner, loads_of(costs, owner, ranks), bound, lpt_makespan)


def assign_kinds(
    costs: FloatArray, whole: BoolArray, pieces: Pieces, sharded: BoolArray, *, dp: int, tp: int
) -> Ownership:
    """Balance two kinds of matrices, each by itself: Newton-Schulz time, and memory at owners.

    Args:
        costs: [matrices] `newton_schulz_cost`, or `whole_cost`.
        whole: [matrices] true where it is the latter.
        pieces: Where the matrices lie.
        sharded: See `assign_owners`.
        dp: Rows.
        tp: Tensor-parallel ranks of a row.

    Returns:
        Owners of all; loads and bounds are those of Newton-Schulz, if anything is orthogonalised.
    """
    found = None
    owner = np.zeros(len(costs), dtype=np.int64)
    for kind, slack in ((~whole, SLACK), (whole, MEMORY_SLACK)):
        chosen = np.flatnonzero(kind)
        if not len(chosen):
            continue
        held = kind[pieces.matrix]
        some = Pieces(
            matrix=np.searchsorted(chosen, pieces.matrix[held]),
            row=pieces.row[held],
            start=pieces.start[held],
            numel=pieces.numel[held],
        )
        owned = assign_owners(
            costs[chosen].tolist(), some, sharded[chosen], dp=dp, tp=tp, slack=slack
        )
        owner[chosen] = owned.owner
        found = found or owned
    found = found or assign_owners([], pieces, sharded, dp=dp, tp=tp)
    return found._replace(owner=owner)


def _by_cost(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def _holders(pieces: Pieces, count: int) -> list[list[tuple[int, int]]]:
    """Return for each matrix the (elements, row) that it lies in, largest first."""
    holders: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    entries = zip(pieces.matrix.tolist(), pieces.row.tolist(), pieces.numel.tolist(), strict=True)
    for matrix, row, numel in entries:
        holders[matrix].append((numel, row))
    for each in holders:
        each.sort(key=lambda entry: (-entry[0], entry[1]))
    return holders


def _prefer_holders(
    costs: Sequence[float],
    holders: list[list[tuple[int, int]]],
    target: float,
    *,
    ranks: int,
    tp: int,
) -> list[int]:
    """Assign, largest first, to the largest holder that stays within `target`, else least loaded.

    Of matrices that cost the same, the ones that would move most are placed first.
    """
    loads: list[float] = [0.0] * ranks
    heap = [(0.0, rank) for rank in range(ranks)]
    owner = [0] * len(costs)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], -holders[i][0][0], i))
    for index in order:
        rank = _lightest_holder(holders[index], loads, target - costs[index], tp)
        if rank is None:
            # A rank that got a matrix as a holder has an outdated entry; entries only ever grow.
            while heap[0][0] != loads[heap[0][1]]:
                heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
            rank = heap[0][1]
        owner[index] = rank
        loads[rank] += costs[index]
    return owner


def _lightest_holder(
    holders: list[tuple[int, int]], loads: list[float], limit: float, tp: int
) -> int | None:
    """Return the rank of the largest share, then the least load, whose load is within `limit`."""
    best: tuple[int, float, int] | None = None
    for numel, row in holders:
        if best is not None and numel < -best[0]:
            break
        for rank in range(row * tp, (row + 1) * tp):
            if loads[rank] <= limit and (best is None or (-numel, loads[rank], rank) < best):
                best = (-numel, loads[rank], rank)
    return None if best is None else best[2]


def _match_to_holders(
    costs: Sequence[float], holders: list[list[tuple[int, int]]], plain: list[int], tp: int
) -> list[int]:
    """Keep the loads of `plain` exactly, swapping matrices of equal cost towards holders."""
    quota = Counter(zip(costs, plain, strict=True))
    owner: dict[int, int] = {}
    for index in sorted(range(len(costs)), key=lambda i: (-holders[i][0][0], i)):
        for rank in _ranks_of(holders[index], tp):
            if quota[costs[index], rank] > 0:
                quota[costs[index], rank] -= 1
                owner[index] = rank
                break
    spare: defaultdict[float, list[int]] = defaultdict(list)
    for (cost, rank), number in sorted(quota.items()):
        spare[cost].extend([rank] * number)
    return [owner[i] if i in owner else spare[cost].pop() for i, cost in enumerate(costs)]


def _ranks_of(holders: list[tuple[int, int]], tp: int) -> Iterator[int]:
    for _, row in holders:
        yield from range(row * tp, (row + 1) * tp)
