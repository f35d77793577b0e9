"""An estimate, from a plan alone, of the workspace of the exchange and Newton-Schulz."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_lw.optimizer.pieces import IntArray

if TYPE_CHECKING:
    from megatron_lw.optimizer.plan import OwnershipPlan


def peak_workspace_numel(plan: OwnershipPlan) -> IntArray:
    """Return [ranks] the estimated peak workspace in elements of the exchange dtype.

    The exchange runs one bucket ahead, so it holds the travelling matrices of two consecutive
    buckets: whole at the owner, and the updates of its pieces at each holder. Newton-Schulz holds
    one batch of equal shapes twice (a product and its input) and three square matrices of the short
    side for each.
    """
    return _exchange_numel(plan) + _newton_schulz_numel(plan)


def _exchange_numel(plan: OwnershipPlan) -> IntArray:
    ordinal = np.unique(plan.matrix_bucket, return_inverse=True)[1].reshape(-1)
    whole = plan.matrix_numel * np.where(plan.sharded, plan.tp, 1)
    away = plan.pieces.row != plan.owner[plan.pieces.matrix] // plan.tp
    travels = plan.sharded & (plan.tp > 1)
    np.logical_or.at(travels, plan.pieces.matrix, away)
    ranks, ordinals, numels = [plan.owner], [ordinal], [whole * travels]
    target = plan.owner[plan.pieces.matrix]
    for t in range(plan.tp):
        holder = plan.pieces.row * plan.tp + t
        ranks.append(holder)
        ordinals.append(ordinal[plan.pieces.matrix])
        numels.append(plan.pieces.numel * (holder != target))
    # Window w holds the buckets w - 1 and w.
    window = np.concatenate([*ordinals, *(each + 1 for each in ordinals)])
    return _peak_sum(
        np.concatenate([*ranks, *ranks]),
        window,
        np.concatenate([*numels, *numels]),
        plan.dp * plan.tp,
    )


def _newton_schulz_numel(plan: OwnershipPlan) -> IntArray:
    shapes = np.array([plan.params[i].matrix or (0, 0) for i in plan.matrix_param], dtype=np.int64)
    shapes = shapes.reshape(-1, 2)
    kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
    batch = plan.matrix_bucket * max(1, len(kinds)) + kind.reshape(-1)
    numel = 2 * shapes.prod(axis=1) + 3 * shapes.min(axis=1, initial=np.iinfo(np.int64).max) ** 2
    return _peak_sum(plan.owner, batch, numel, plan.dp * plan.tp)


def _peak_sum(rank: IntArray, slot: IntArray, numel: IntArray, ranks: int) -> IntArray:
    """Sum `numel` over equal (rank, slot) and return the largest sum of each rank."""
    slots = int(slot.max(initial=0)) + 1
    keys, place = np.unique(rank * slots + slot, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, place.reshape(-1), numel)
    peak = np.zeros(ranks, dtype=np.int64)
    np.maximum.at(peak, keys // slots, sums)
    return peak
