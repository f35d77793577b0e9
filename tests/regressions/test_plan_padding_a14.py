"""A14: NVIDIA/Megatron-LM#4771: a whole-parameter layout wasted (dp - 1) embeddings. Exact."""

from __future__ import annotations

from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import PlanParam, plan_domain


def test_an_embedding_beside_small_matrices_is_not_padded_to_dp_times_its_size() -> None:
    dp = 8
    params = [PlanParam(name="embedding", numel=1000 * 8, child="adam")]
    params += [PlanParam(name=f"w{i}", numel=64, matrix=(8, 8), child="muon") for i in range(4)]
    plan = plan_domain(params, dp=dp)
    layouts = [BucketLayout.build(plan, bucket.index) for bucket in plan.buckets]
    allocated = sum(layout.numel for layout in layouts)
    total = 1000 * 8 + 4 * 64
    assert allocated <= total + 64 * dp * len(layouts)
    declared = sum(stop - start for layout in layouts for start, stop in layout.padding)
    assert allocated == total + declared
