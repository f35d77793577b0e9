"""Four pipeline stages: two of them have neither end of the tied embedding."""

from __future__ import annotations

from tests.megatron import launch, needs
from tests.megatron.test_side_by_side import BATCH, FP32, check_fp32

needs.megatron()


def test_side_by_side_with_stages_in_between() -> None:
    """Numerical, as in `test_side_by_side`."""
    flags = "--pipeline-model-parallel-size 4 --num-layers 4 --train-iters 10".split()
    case = [*flags, *BATCH, *FP32]
    check_fp32(launch.on_ranks(4, "training_cases", "side_by_side", case, True), 10)


def test_groups_are_adopted_or_made() -> None:
    for found in launch.on_ranks(4, "stages_cases", "groups"):
        rank = found["rank"]
        alone = (rank,)
        assert found["all"] == found["least"]
        assert found["all"] == {
            "dp": alone,
            "tp": alone,
            "pp": (0, 1, 2, 3),
            "ep": alone,
            "expert_dp": alone,
            "expert_tp": alone,
            "tp_dp": alone,
            "expert_tp_dp": alone,
            "embedding": (0, 3) if rank in (0, 3) else alone,
        }
        assert "pg_collection.dp_cp is None" in found["refused"]
