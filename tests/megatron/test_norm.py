"""The gradient norm inside Megatron equals one process's, and no default group is used.

Class of equality: numerical, 1e-6 relative (the same gradients, summed in another order).
"""

from __future__ import annotations

import pytest

from tests.harness import run_ranks
from tests.megatron import launch, needs

needs.megatron()

MOE = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
LAYOUTS: dict[str, tuple[int, str]] = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2_tied": (2, "--pipeline-model-parallel-size 2"),
    "ep2_with_biases": (2, f"{MOE} --expert-model-parallel-size 2"),
    "tp2_ep2_expert_tp1": (
        4,
        f"{MOE} --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --disable-bias-linear",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_gradient_counts_once(name: str) -> None:
    ranks, flags = LAYOUTS[name]
    found = run_ranks(launch.run, ranks, "norm_cases", "norms", flags.split(), timeout=300)
    assert len(found[0]) == 2
    for steps in found:
        for norm, whole, parts in steps:
            assert parts > 20
            assert norm == pytest.approx(whole, rel=1e-6)
