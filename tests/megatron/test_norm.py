"""Gradient norm and zero count inside Megatron equal one process's; no default group is used.

Class of equality: numerical, 1e-6 relative (the same gradients, summed in another order); exact for
counts.
"""

from __future__ import annotations

import pytest

from tests.megatron import launch, needs
from tests.megatron.runs import MOE

needs.megatron()

# Most tokens occur in no batch: the gradients of their embeddings are zero.
UNSEEN = "--vocab-size 500 --untie-embeddings-and-output-weights"
LAYOUTS: dict[str, tuple[int, str]] = {
    "tp2": (2, f"{UNSEEN} --tensor-model-parallel-size 2"),
    "pp2_tied": (2, "--pipeline-model-parallel-size 2"),
    "ep2_with_biases": (2, f"{UNSEEN} {MOE} --expert-model-parallel-size 2"),
    "tp2_whole_experts_with_biases": (
        2,
        f"{UNSEEN} {MOE} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    "expert_tp2": (2, f"{UNSEEN} {MOE} --expert-tensor-parallel-size 2 --disable-bias-linear"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_gradient_counts_once(name: str) -> None:
    ranks, flags = LAYOUTS[name]
    found = launch.on_ranks(ranks, "norm_cases", "statistics", flags.split())
    assert len(found[0]) == 2
    for steps in found:
        for (norm, zeros), (whole, counted, parts) in steps:
            assert parts > 20
            assert norm == pytest.approx(whole, rel=1e-6)
            assert zeros == counted
            assert (counted > 1000) == (UNSEEN in flags)
