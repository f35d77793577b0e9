"""`install()`: the names through which `megatron.training` builds model and optimizer become ours.

What is replaced is remembered in the replacement itself (`restores`), so that `uninstall()` needs
no state of its own and puts every name back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.training import checkpointing, get_args, training
from megatron.training.models import dist_utils
from torch import nn

from megatron_lw.errors import ConfigError
from megatron_lw.integrations.megatron import adopt, api
from megatron_lw.integrations.megatron.checkpoint_load import DIRECTORY, OWN_SCHEDULE


class Replacement:
    """A function of ours in place of one of Megatron's.

    Attributes:
        restores: the function that `uninstall` puts back.
    """

    def __init__(self, ours: Callable[..., Any], restores: Callable[..., Any]) -> None:
        self._ours = ours
        self.restores = restores
        self.__name__ = ours.__name__
        self.__doc__ = ours.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ours."""
        return self._ours(*args, **kwargs)


def install(*, ddp: bool = True) -> None:
    """Make `megatron.training` wrap models in our DDP and step them with our optimizer.

    Call it before `pretrain`. A further call replaces what an earlier one has installed.

    Args:
        ddp: False keeps Megatron's own DDP with all-reduced gradients, see `adopt_megatron_ddp`:
            synchronous, BF16 and FP32.
    """
    uninstall()
    for module, name, ours in _REPLACED if ddp else _ADOPTING:
        setattr(module, name, Replacement(ours, getattr(module, name)))


def uninstall() -> None:
    """Put Megatron's own functions back; what was built stays ours."""
    for module, name, _ in _REPLACED:
        found = getattr(module, name)
        if isinstance(found, Replacement):
            setattr(module, name, found.restores)


def _wrap_in_training(
    model_chunks: Sequence[nn.Module],
    config: Any,
    ddp_config: Any,
    *,
    DP: type[nn.Module] = MegatronDDP,
    pg_collection: Any = None,
    use_layer_wise_distributed_optimizer: bool = False,
    use_layer_wise_param_layout: bool = True,
    **unused: Any,
) -> list[nn.Module]:
    """In place of `megatron.training.training.wrap_model_chunks_with_ddp`."""
    if DP is not MegatronDDP:
        _refuse(DP.__name__)
    apart = use_layer_wise_distributed_optimizer and use_layer_wise_param_layout
    return list(
        api.wrap_model_chunks(model_chunks, config, ddp_config, pg_collection, scalars_apart=apart)
    )


def _wrap_in_builder(
    model: Sequence[nn.Module],
    data_parallel_random_init: bool,
    ddp_config: Any,
    overlap_param_gather_with_optimizer_step: bool,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    *,
    pg_collection: Any,
) -> list[nn.Module]:
    """In place of `megatron.training.models.dist_utils._ddp_wrap`."""
    if use_megatron_fsdp or use_torch_fsdp2:
        _refuse("FullyShardedDataParallel")
    config = dist_utils.get_model_config(model[0])
    chunks = api.wrap_model_chunks(model, config, ddp_config, pg_collection)
    if data_parallel_random_init:
        for chunk in chunks:
            chunk.broadcast_params()
    return list(chunks)


def _build_in_training(config: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `megatron.training.training.get_megatron_optimizer`."""
    _refuse_to_save(get_args())
    return api.get_megatron_optimizer(config, *args, **kwargs)


def _adopt_in_training(config: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for `install(ddp=False)`."""
    _refuse_to_save(get_args())
    return adopt.adopt_megatron_ddp(config, *args, **kwargs)


def _log_logits(model: Any, log_max_only: bool = False) -> Any:
    """In place of `megatron.training.training.clip_qk`: the step has clipped, see `qk_clip.py`."""
    theirs: Any = training.clip_qk
    return theirs.restores(model, log_max_only=True)


def _refuse_to_save(args: Any) -> None:
    """Refuse now what the first save would come to after hours.

    Args:
        args: Megatron's command line.

    Raises:
        ConfigError: naming the flag, its value and the remedy.
    """
    if args.save is None:
        return
    per_rank = args.ckpt_format == "torch" and args.use_layer_wise_distributed_optimizer
    if args.ckpt_format != "torch_dist" and (per_rank or not args.no_save_optim):
        # Megatron saves a layer-wise optimizer in that format whatever --no-save-optim says.
        alone = "drop --save" if per_rank else "save the model alone with --no-save-optim"
        raise ConfigError(
            f"--ckpt-format {args.ckpt_format} cannot hold the optimizer, whose state lies in rows "
            f"on all ranks; pass --ckpt-format torch_dist, or {alone}"
        )
    if args.non_persistent_ckpt_type == "local" and not args.no_save_optim:
        raise ConfigError(
            "--non-persistent-ckpt-type local cannot hold the optimizer, which every layout of "
            "ranks can read; pass --non-persistent-ckpt-type global"
        )


def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """Megatron's own; content metadata then tell `load_targets` what it cannot see from there.

    That is where the checkpoint is, and whether the schedule is to be the present one's.
    """
    theirs: Any = checkpointing._load_base_checkpoint
    found = theirs.restores(*args, **kwargs)
    if not kwargs.get("rank0"):
        return found  # with some values of --dist-ckpt-strictness its state is a tuple
    state, directory, *_ = found
    content = None if state is None else state.get("content_metadata")
    if content is not None:
        content[DIRECTORY] = str(directory)
        content[OWN_SCHEDULE] = bool(args[1].override_opt_param_scheduler)
    return found


def _refuse(wrapper: str) -> None:
    raise ConfigError(
        f"the model is to be wrapped in {wrapper}, which the layer-wise optimizer cannot adopt; "
        "drop --use-megatron-fsdp and --use-torch-fsdp2"
    )


_REPLACED: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (training, "wrap_model_chunks_with_ddp", _wrap_in_training),
    (training, "get_megatron_optimizer", _build_in_training),
    (training, "clip_qk", _log_logits),
    (dist_utils, "_ddp_wrap", _wrap_in_builder),
    (checkpointing, "_load_base_checkpoint", _load_base_checkpoint),
)
_ADOPTING: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (training, "get_megatron_optimizer", _adopt_in_training),
    (training, "clip_qk", _log_logits),
    (checkpointing, "_load_base_checkpoint", _load_base_checkpoint),
)
