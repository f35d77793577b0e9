"""A7: PrimeIntellect-ai/prime-rl#3437, #3438: "72 not divisible by 16" at the first step.

Rows cut the flat bucket, never a dimension, so nothing needs to divide. Exact.
"""

from __future__ import annotations

import pytest

from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import PlanParam, plan_domain


@pytest.mark.parametrize(("dp", "empty"), [(8, 3), (16, 7), (5, 0), (7, 2), (100, 91)])
def test_72_rows_over_any_number_of_ranks(dp: int, empty: int) -> None:
    plan = plan_domain([PlanParam(name="w", numel=576, matrix=(72, 8), child="muon")], dp=dp)
    layout = BucketLayout.build(plan, 0)
    assert sum(slot.numel for row in layout.slots for slot in row) == 576
    assert len(plan.owner) == 1
    assert plan.loads[plan.owner[0]] == 72 * 8**2
    assert [len(row) for row in layout.slots] == [1] * (dp - empty) + [0] * empty
