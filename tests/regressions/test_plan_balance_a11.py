"""A11: NVIDIA/Megatron-LM#2163: embedding and output dominate; two ranks hold most of the state.

Sorted ping-pong assignment left one rank with up to 2.5 times the average. Storage is even here:
embeddings are split by elements, and only the computation of matrices has an owner. Exact.
"""

from __future__ import annotations

import pytest

from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import PlanParam, plan_domain


def shapes() -> list[PlanParam]:
    """32 layers of width 4096 and 11008, and two matrices of 50k x 4096."""
    layer = {"q": (4096, 4096), "k": (4096, 4096), "v": (4096, 4096), "o": (4096, 4096)}
    layer |= {"gate": (11008, 4096), "up": (11008, 4096), "down": (4096, 11008)}
    params = [
        PlanParam(name=f"layers.{i}.{name}", numel=m * n, matrix=(m, n), child="muon")
        for i in range(32)
        for name, (m, n) in layer.items()
    ]
    big = 50_000 * 4096
    return params + [PlanParam(name=name, numel=big, child="adam") for name in ("emb", "output")]


@pytest.mark.parametrize("dp", [4, 8, 16, 32, 64])
def test_every_rank_holds_the_same_state_and_part_of_the_embedding(dp: int) -> None:
    plan = plan_domain(shapes(), dp=dp)
    held = [0] * dp
    embedding = [0] * dp
    for bucket in plan.buckets:
        for row, slots in enumerate(BucketLayout.build(plan, bucket.index).slots):
            for slot in slots:
                held[row] += slot.numel
                if plan.params[slot.param].name == "emb":
                    embedding[row] += slot.numel
    mean = sum(held) / dp
    assert max(held) <= 1.001 * mean
    assert min(embedding) > 0
    assert plan.metrics().memory_over_ideal <= 1.001
    assert plan.makespan <= max(1.05 * plan.bound, plan.lpt_makespan)
    assert plan.makespan <= plan.cost.sum() / dp + plan.cost.max()
