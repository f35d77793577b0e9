"""The workspace of a matrix child, from a plan alone: what `MatrixChild` allocates, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_lw.optimizer.pieces import IntArray

if TYPE_CHECKING:
    from megatron_lw.optimizer.plan import OwnershipPlan

# Measured on CPU, one thread: in bf16 a batch is 9 times as fast as calls one by one at 32, 3 times
# at 64, 1.2 times at 128 and not at all from 256 on; in fp32 2.5 times at 32 and not at all from 64
# on (benchmarks/newton_schulz.py).
BATCH_BELOW = 256
"""Matrices whose short side is below this are orthogonalised in batches."""
BATCH_WORKSPACE = 1 << 26
"""Elements that the workspace of a batch has at most, unless one matrix needs more."""
IN_FLIGHT = 3
"""Buckets in flight without tensor parallelism: begun, computed, applied."""
IN_FLIGHT_DIVIDED = 5
"""With it the shards travel too, before and after the computation."""
_FP32_SCRATCH = 2


def peak_workspace_numel(plan: OwnershipPlan) -> IntArray:
    """Return [ranks] the workspace in elements of the exchange dtype (2 bytes).

    Rows of inputs and buffers of the exchange for each bucket in flight, an fp32 scratch row, and
    the workspace of the Newton-Schulz iteration. Alignment of single matrices is left out.
    """
    rows = [bucket.row_length for i, bucket in enumerate(plan.buckets) if plan.is_matrix_bucket(i)]
    longest = max(rows, default=0)
    in_flight = min(IN_FLIGHT_DIVIDED if plan.tp > 1 else IN_FLIGHT, len(rows))
    exchange, shards = _exchange_numel(plan)
    buffers = np.repeat(exchange, plan.tp) + 2 * shards
    once = _FP32_SCRATCH * longest + _iteration_numel(plan) + _gathered_numel(plan)
    return in_flight * (longest + buffers) + once


def _exchange_numel(plan: OwnershipPlan) -> tuple[IntArray, IntArray]:
    """[rows] elements assembled, sent and received for a bucket; [ranks] divided ones whole."""
    ordinal = np.unique(plan.matrix_bucket, return_inverse=True)[1].reshape(-1)
    of_piece = plan.pieces.matrix
    owner_row = plan.owner // plan.tp
    count = np.bincount(of_piece, minlength=len(plan.owner))
    away = plan.pieces.row != owner_row[of_piece]
    cut = (count > 1) | (np.bincount(of_piece, weights=away, minlength=len(plan.owner)) > 0)
    local = plan.matrix_numel
    assembly = _peak_sum(owner_row, ordinal, local * cut, plan.dp)
    through_tensor = _peak_sum(owner_row, ordinal, local, plan.dp) * (plan.tp - 1)
    moved = plan.pieces.numel * away
    leaving = _peak_sum(plan.pieces.row, ordinal[of_piece], moved, plan.dp)
    arriving = _peak_sum(owner_row[of_piece], ordinal[of_piece], moved, plan.dp)
    divided = plan.sharded & (plan.tp > 1)
    shards = _peak_sum(plan.owner, ordinal, local * plan.tp * divided, plan.dp * plan.tp)
    both_ways = np.maximum(leaving, through_tensor) + np.maximum(arriving, through_tensor)
    return assembly + both_ways, shards


def _iteration_numel(plan: OwnershipPlan) -> IntArray:
    found = [(i, *shape) for i in range(len(plan.owner)) for shape in plan.unit_of(i).matrices]
    of, *sides = np.array(found, dtype=np.int64).reshape(-1, 3).T
    shapes = np.stack(sides, axis=1)
    kind = np.unique(shapes, axis=0, return_inverse=True)[1]
    short = shapes.min(axis=1, initial=np.iinfo(np.int64).max)
    single = 2 * shapes.prod(axis=1) + 2 * short**2
    # A large matrix has a slot of its own, so that it is not added to others of its shape.
    alone = np.where(short < BATCH_BELOW, 0, np.arange(len(single)) + 1)
    batch = np.unique(
        np.stack([plan.matrix_bucket[of], kind.reshape(-1), alone], axis=1),
        axis=0,
        return_inverse=True,
    )[1].reshape(-1)
    ranks = plan.dp * plan.tp
    largest = np.zeros(ranks, dtype=np.int64)
    np.maximum.at(largest, plan.owner[of], single)
    batched = _peak_sum(plan.owner[of], batch, single, ranks)
    return np.maximum(largest, np.minimum(batched, BATCH_WORKSPACE))


def _gathered_numel(plan: OwnershipPlan) -> IntArray:
    """[ranks] elements of a bucket whose rows are gathered into matrices, as of fused QKV."""
    several = np.array(
        [len(plan.unit_of(i).matrices) > 1 for i in range(len(plan.owner))], dtype=np.bool_
    )
    whole = plan.matrix_numel * np.where(plan.sharded, plan.tp, 1) * several
    return _peak_sum(plan.owner, plan.matrix_bucket, whole, plan.dp * plan.tp)


def _peak_sum(rank: IntArray, slot: IntArray, numel: IntArray, ranks: int) -> IntArray:
    """Sum `numel` over equal (rank, slot) and return the largest sum of each rank."""
    slots = int(slot.max(initial=0)) + 1
    keys, place = np.unique(rank * slots + slot, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, place.reshape(-1), numel)
    peak = np.zeros(ranks, dtype=np.int64)
    np.maximum.at(peak, keys // slots, sums)
    return peak
