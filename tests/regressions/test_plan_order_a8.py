"""A8: NVIDIA/Megatron-LM#5479 (review), Paddle#79740: ranks disagree on owners.

Equal sizes, a stable sort and a registration order that differs from rank to rank gave different
owners. Here the order is total, on names. Exact.
"""

from __future__ import annotations

import random

import pytest

from megatron_lw.optimizer.plan import OwnershipPlan, PlanParam, plan_domain

EQUAL = [PlanParam(name=f"w{i}", numel=4096, matrix=(64, 64), child="muon") for i in range(12)]
MIXED = [
    PlanParam(name=f"norm{i}", numel=64 + i % 2, child="adam", group=f"group{i % 2}")
    for i in range(12)
]


def decisions(plan: OwnershipPlan) -> tuple[object, ...]:
    return plan.params, plan.buckets, plan.owner.tolist(), plan.digest()


@pytest.mark.parametrize("dp", [3, 5])
def test_twelve_equal_matrices_in_any_order_have_the_same_owners(dp: int) -> None:
    orders = [EQUAL + MIXED, list(reversed(EQUAL + MIXED)), [*MIXED, *EQUAL]]
    random.Random(1).shuffle(orders[1])
    plans = [plan_domain(order, dp=dp) for order in orders]
    assert decisions(plans[0]) == decisions(plans[1]) == decisions(plans[2])
    counts = [plans[0].owner.tolist().count(rank) for rank in range(dp)]
    assert max(counts) - min(counts) <= 1


def test_a_rank_with_another_fact_is_found_by_its_digest_and_named() -> None:
    other = [*EQUAL[:-1], PlanParam(name="w11", numel=4096, matrix=(32, 128), child="muon")]
    plans = [plan_domain(params, dp=3) for params in (EQUAL, other)]
    assert plans[0].digest() != plans[1].digest()
    pairs = zip(plans[0].facts(), plans[1].facts(), strict=True)
    assert any("w11" in ours for ours, theirs in pairs if ours != theirs)
