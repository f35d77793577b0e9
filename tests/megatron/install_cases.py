"""What `install` replaces, and which models are refused; imported on ranks only."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.models import dist_utils
from torch import nn

from megatron_lw.errors import ConfigError
from megatron_lw.integrations import megatron as megatron_lw

PLACES: tuple[tuple[Any, str], ...] = (
    (training, "wrap_model_chunks_with_ddp"),
    (training, "get_megatron_optimizer"),
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
            "wrapped by another": _message(
                lambda: megatron_lw.get_megatron_optimizer(config, [module])
            ),
            "nothing": _message(lambda: megatron_lw.get_megatron_optimizer(config, [])),
            "FSDP": _message(lambda: wrap([module], plain, None, DP=nn.Module)),
            "FSDP of the builder": _message(
                lambda: build(
                    [module], False, None, False, use_torch_fsdp2=True, pg_collection=None
                )
            ),
            "conditional embedder": _message(lambda: wrap([module], embedder, None)),
            "divided again": _message(
                lambda: wrap([module], plain, None, DP=MegatronDDP, pg_collection=divided)
            ),
            "adopted, not wrapped": _message(
                lambda: megatron_lw.adopt_megatron_ddp(config, [module])
            ),
        }
    finally:
        megatron_lw.uninstall()


class _Group:
    """As much of a process group as is asked for its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing was raised"
