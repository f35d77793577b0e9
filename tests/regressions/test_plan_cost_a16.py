"""A16: NVIDIA/Megatron-LM#6379: balanced by elements, unbalanced in time.

Newton-Schulz costs max * min^2, so a square matrix costs more than a flat one of equal size. Exact.
"""

from __future__ import annotations

from collections import Counter

from megatron_lw.optimizer.plan import PlanParam, plan_domain


def test_each_rank_gets_two_square_and_two_flat_matrices() -> None:
    # Interleaved so that neither the order nor the number of elements balances them by itself.
    params = [
        PlanParam(name=f"{2 * i + j}", numel=m * n, matrix=(m, n), child="muon")
        for i in range(8)
        for j, (m, n) in enumerate(
            ((1024, 1024), (16384, 64)) if i < 4 else ((16384, 64), (1024, 1024))
        )
    ]
    plan = plan_domain(params, dp=4)
    owned = Counter(zip(plan.owner.tolist(), plan.cost.tolist(), strict=True))
    assert owned == {(rank, cost): 2 for rank in range(4) for cost in (2.0**30, 2.0**26)}
    assert plan.metrics().matrices_whole_fraction == 1.0


def test_the_cost_is_an_argument() -> None:
    params = [
        PlanParam(name=name, numel=m * n, matrix=(m, n), child="muon")
        for name, (m, n) in {"a": (64, 64), "b": (4096, 1), "c": (1, 4096)}.items()
    ]
    flat_is_free = plan_domain(params, dp=2)
    assert flat_is_free.makespan == 64**3
    by_elements = plan_domain(params, dp=2, cost=lambda rows, cols: rows * cols)
    assert by_elements.makespan == 2 * 4096
