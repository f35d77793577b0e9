"""B2: NVIDIA/Megatron-LM!1980: a misaligned bucket after the end that a separate embedding forces.

Every bucket starts and ends at a multiple of world x alignment, also the one before a tied
embedding. Exact.
"""

from __future__ import annotations

from itertools import accumulate

import pytest

from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import PlanParam, plan_domain


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_starts_and_sizes_are_multiples_of_world_times_alignment(alignment: int) -> None:
    params = [
        PlanParam(name="a", numel=5, child="adam"),
        PlanParam(name="b", numel=7, child="adam"),
        PlanParam(name="embedding", numel=8, child="adam", tied="words"),
    ]
    plan = plan_domain(params, dp=3, alignment=alignment)
    layouts = [BucketLayout.build(plan, bucket.index) for bucket in plan.buckets]
    assert [bucket.tied for bucket in plan.buckets] == ["words", None]
    assert [len(layout.params) for layout in layouts] == [1, 2]
    sizes = [layout.numel for layout in layouts]
    for value in (*sizes, *accumulate(sizes)):
        assert value % (3 * alignment) == 0
    for layout in layouts:
        assert layout.numel < sum(layout.numels) + 3 * alignment + len(layout.params) * alignment
