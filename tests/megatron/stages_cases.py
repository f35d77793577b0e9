"""Groups where pipeline stages lie between the first and the last; imported on ranks only."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_lw.integrations.megatron import parallel_groups
from tests.megatron.runs import refusal

NAMES = ("dp", "tp", "pp", "ep", "expert_dp", "expert_tp", "tp_dp", "expert_tp_dp", "embedding")


def groups() -> dict[str, Any]:
    """Ranks of our groups, from `parallel_state` and from a collection with the least in it."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    try:
        whole = ProcessGroupCollection.use_mpu_process_groups()
        least = ProcessGroupCollection(tp=whole.tp, pp=whole.pp, dp_cp=whole.dp_cp)
        return {
            "all": _ranks(None),
            "least": _ranks(least),
            "refused": refusal(
                lambda: parallel_groups(ProcessGroupCollection(tp=whole.tp, pp=whole.pp))
            ),
            "rank": dist.get_rank(),
        }
    finally:
        parallel_state.destroy_model_parallel()


def _ranks(given: ProcessGroupCollection | None) -> dict[str, tuple[int, ...]]:
    found = parallel_groups(given)
    return {name: getattr(found, name).ranks for name in NAMES}
