"""What `install` replaces, and which models are refused; imported on ranks only."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.models import dist_utils
from torch import nn

from megatron_lw.integrations import megatron as megatron_lw
from megatron_lw.integrations.megatron.names import name_map
from tests.megatron.runs import refusal

PLACES: tuple[tuple[Any, str], ...] = (
    (training, "wrap_model_chunks_with_ddp"),
    (training, "get_megatron_optimizer"),
    (training, "clip_qk"),
    (dist_utils, "_ddp_wrap"),
)


def replaced() -> dict[str, list[str]]:
    """For each call: which of Megatron's functions are not its own."""
    theirs = [getattr(module, name) for module, name in PLACES]

    def changed() -> list[str]:
        found = zip(PLACES, theirs, strict=True)
        return [name for (module, name), own in found if getattr(module, name) is not own]

    found = {"before": changed()}
    megatron_lw.install()
    megatron_lw.install()
    found["install()"] = changed()
    megatron_lw.install(ddp=False)
    found["install(ddp=False)"] = changed()
    megatron_lw.uninstall()
    megatron_lw.uninstall()
    found["uninstall()"] = changed()
    return found


def signatures() -> tuple[str, str]:
    """Names and defaults of the arguments: ours, and Megatron's."""

    def shown(function: Callable[..., Any]) -> str:
        found = inspect.signature(function).parameters.values()
        return ", ".join(f"{each.name}={each.default}" for each in found)

    return shown(megatron_lw.get_megatron_optimizer), shown(get_megatron_optimizer)


def refused() -> dict[str, str]:
    """What is said of models that cannot be adopted."""
    config = OptimizerConfig(lr=0.1)
    module = nn.Linear(2, 2)
    plain = types.SimpleNamespace()
    embedder = types.SimpleNamespace(has_cond_embedder=True)
    divided = ProcessGroupCollection(
        tp=(whole := _Group(1)), pp=whole, dp_cp=whole, gtp_remat=_Group(2)
    )
    megatron_lw.install()
    try:
        wrap, build = training.wrap_model_chunks_with_ddp, dist_utils._ddp_wrap
        return {
            "wrapped by another": refusal(
                lambda: megatron_lw.get_megatron_optimizer(config, [module])
            ),
            "nothing": refusal(lambda: megatron_lw.get_megatron_optimizer(config, [])),
            "FSDP": refusal(lambda: wrap([module], plain, None, DP=nn.Module)),
            "FSDP of the builder": refusal(
                lambda: build(
                    [module], False, None, False, use_torch_fsdp2=True, pg_collection=None
                )
            ),
            "conditional embedder": refusal(lambda: wrap([module], embedder, None)),
            "no global names": refusal(lambda: name_map(module, 0, 0, None)),
            "a name left out": refusal(lambda: name_map(_Described(["weight"]), 0, 0, None)),
            "a name twice": refusal(lambda: name_map(_Described(["same", "same"]), 0, 0, None)),
            "divided again": refusal(
                lambda: wrap([module], plain, None, DP=MegatronDDP, pg_collection=divided)
            ),
            "adopted, not wrapped": refusal(
                lambda: megatron_lw.adopt_megatron_ddp(config, [module])
            ),
        }
    finally:
        megatron_lw.uninstall()


class _Described(nn.Linear):
    """A layer whose sharded state dict gives these keys to weight and bias, in this order."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(2, 2)
        self._keys = keys

    def sharded_state_dict(self, metadata: Any) -> dict[str, ShardedTensor]:
        named = zip(self._keys, self.named_parameters(), strict=False)
        return {n: ShardedTensor.from_rank_offsets(key, p) for key, (n, p) in named}


class _Group:
    """As much of a process group as is asked for its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size
