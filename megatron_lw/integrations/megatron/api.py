"""`get_megatron_optimizer` with Megatron's signature, for Megatron's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_lw.distributed.agreement import attempt
from megatron_lw.errors import ConfigError
from megatron_lw.groups import ParallelGroups
from megatron_lw.integrations.megatron import settings
from megatron_lw.integrations.megatron.ddp import DistributedDataParallel
from megatron_lw.integrations.megatron.groups import parallel_groups
from megatron_lw.integrations.megatron.names import name_map, sharded_entries
from megatron_lw.integrations.megatron.optimizer import MegatronOptimizer
from megatron_lw.integrations.megatron.qk_clip import MegatronQKClip
from megatron_lw.integrations.megatron.tags import complete_tags
from megatron_lw.optimizer.api import build_optimizer
from megatron_lw.optimizer.names import NameMap

_REFUSED = {
    "has_cond_embedder": "gradients of a conditional embedder are summed over pipeline stages, "
    "whose rows differ; drop it",
    "flextron": "gradients of its routers are summed over pipeline stages, whose rows differ; drop "
    "it",
}


def refuse_model(config: Any) -> None:
    """Refuse what a model asks for and no optimizer of ours can honour.

    Args:
        config: Megatron's model configuration.

    Raises:
        ConfigError: naming the field, and the remedy.
    """
    for field, reason in _REFUSED.items():
        if getattr(config, field, False):
            raise ConfigError(f"{field}=True is not supported: {reason}")


def wrap_model_chunks(
    model_chunks: Sequence[nn.Module],
    config: Any,
    ddp_config: Any,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    scalars_apart: bool = False,
) -> list[DistributedDataParallel]:
    """Wrap the chunks of a Megatron model, half-precision wrappers included, in our DDP.

    Args:
        model_chunks: this rank's chunks.
        config: Megatron's model configuration.
        ddp_config: Megatron's `DistributedDataParallelConfig`; it is not changed.
        pg_collection: Megatron's groups; those of `parallel_state` if None.
        scalars_apart: see `DistributedDataParallel`.

    Collective: see `parallel_groups`; every rank calls it.

    Raises:
        ConfigError: a setting or the model cannot be honoured.
    """
    refuse_model(config)
    given = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    groups = parallel_groups(given)
    num_parameters = sum(p.numel() for chunk in model_chunks for p in chunk.parameters())
    ours = settings.ddp_config(ddp_config, num_parameters=num_parameters)
    maps = name_chunks(model_chunks, config, groups, given.dp_cp)
    return [
        DistributedDataParallel(chunk, groups, config, ours, names, scalars_apart=scalars_apart)
        for chunk, names in zip(model_chunks, maps, strict=True)
    ]


def name_chunks(
    modules: Sequence[nn.Module], config: Any, groups: ParallelGroups, dp_cp_group: Any
) -> list[NameMap]:
    """Complete the tags of every chunk of this rank, and name its parameters.

    Args:
        modules: the chunks, before they are wrapped.
        config: Megatron's model configuration.
        groups: every process group by name.
        dp_cp_group: Megatron's data-parallel group.

    Collective: an agreement over `groups.control`.

    Raises:
        ConfigError: on every rank: see `name_map` and `tag_shards`.
    """

    def named() -> list[NameMap]:
        for module in modules:
            entries = sharded_entries(module, dp_cp_group)
            complete_tags(module, config, groups.tp.size, entries)
        stage = groups.pp.rank
        return [name_map(module, i, stage, dp_cp_group) for i, module in enumerate(modules)]

    return attempt(named, groups.control)


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[Any, Mapping[str, Any]] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """Build the layer-wise optimizer for a Megatron model; signature and objects are Megatron's.

    Args:
        config: Megatron's `OptimizerConfig`, or ours; it is not changed.
        model_chunks: chunks wrapped by `wrap_model_chunks`, which `install` has Megatron call.
        config_overrides: settings of the parameters that a key of Megatron's matches.
        use_gloo_process_groups: has no effect: groups were made when the chunks were wrapped.
        pg_collection: has no effect: the groups are those that the chunks were wrapped with.
        dump_param_to_param_group_map: a file that rank 0 writes the routing report to.

    Collective: see `build_runtime`; every rank calls it with the same settings.

    Raises:
        ConfigError: a setting, a tag or the model cannot be honoured.
        PlanMismatchError: ranks hold different models or settings.
    """
    return build_from_megatron(
        MegatronOptimizer,
        config,
        model_chunks,
        _groups(model_chunks),
        config_overrides,
        dump_param_to_param_group_map,
        named=model_chunks,
    )


def build_from_megatron(
    kind: type[MegatronOptimizer],
    config: Any,
    chunks: Sequence[nn.Module],
    groups: ParallelGroups,
    config_overrides: Mapping[Any, Mapping[str, Any]] | None,
    dump_param_to_param_group_map: str | None,
    *,
    named: Sequence[nn.Module],
) -> MegatronOptimizer:
    """Build an optimizer from Megatron's settings and our chunks.

    Args:
        kind: its class.
        config: Megatron's `OptimizerConfig`, or ours.
        chunks: in our wrapper.
        groups: every process group by name.
        config_overrides: as `get_megatron_optimizer`.
        dump_param_to_param_group_map: the same.
        named: the chunks as Megatron names their parameters, for the keys of the overrides.

    Collective: see `build_runtime`; every rank calls it with the same settings.
    """
    ours = settings.optimizer_config(
        config, tensor_parallel=max(groups.tp.size, groups.expert_tp.size)
    )
    optimizer = build_optimizer(
        kind,
        ours,
        chunks,
        settings.overrides(config_overrides, named, ours),
        groups,
        dump_param_to_param_group_map,
    )
    first: Any = named[0]
    if getattr(first.config, "qk_clip", False):
        MegatronQKClip(optimizer, named, first.config)
    return optimizer


def _groups(model_chunks: Sequence[nn.Module]) -> ParallelGroups:
    for index, chunk in enumerate(model_chunks):
        if not isinstance(chunk, DistributedDataParallel):
            raise ConfigError(
                f"model_chunks[{index}] is a {type(chunk).__name__} that megatron_lw did not wrap: "
                "call install() before the model is built; Megatron's FSDP and torch's cannot be "
                "adopted (drop --use-megatron-fsdp and --use-torch-fsdp2)"
            )
    if not model_chunks:
        raise ConfigError("model_chunks is empty: pass at least one wrapped module")
    first: Any = model_chunks[0]
    groups: ParallelGroups = first.groups
    return groups
