"""`get_megatron_optimizer`: the edge where settings and model become an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_lw.config import OptimizerConfig
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.errors import ConfigError
from megatron_lw.fp8.te import load_fused_adam
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.build import build_runtime
from megatron_lw.optimizer.children.adam_backends import AdamBackend, resolve_adam_backend
from megatron_lw.optimizer.older_arguments import check_older_arguments
from megatron_lw.optimizer.routing import ExplicitGroup
from megatron_lw.optimizer.runtime import Runtime
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer
from megatron_lw.overrides import ParamGroupOverride, ParamKey

OptimizerT = TypeVar("OptimizerT", bound=LayerWiseDistributedOptimizer)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ParallelGroups | None = None,
    dump_param_to_param_group_map: str | None = None,
    **older: Any,
) -> LayerWiseDistributedOptimizer:
    """Build the layer-wise distributed optimizer for a model; the signature is Megatron's.

    Args:
        config: settings; see `OptimizerConfig` for which of Megatron's fields are honoured.
        model_chunks: the model, or its pipeline chunks, each wrapped in
            `megatron_lw.DistributedDataParallel`.
        config_overrides: settings for the parameters that a key matches;
            `megatron_lw.standard_overrides(config)` (no decay for biases and vectors) if None.
        use_gloo_process_groups: has no effect: no further process groups are made.
        pg_collection: the process groups; those that the model was wrapped with if None.
        dump_param_to_param_group_map: a file that rank 0 writes the routing report to.
        older: arguments of earlier releases, at their defaults; see `check_older_arguments`.

    Collective: see `build_runtime`; every rank calls it with the same settings.

    Raises:
        ConfigError: a setting, a tag or the model cannot be honoured.
        PlanMismatchError: ranks hold different models or settings.
    """
    check_older_arguments(config_overrides, older)
    return build_optimizer(
        LayerWiseDistributedOptimizer,
        config,
        model_chunks,
        config_overrides,
        _groups(model_chunks, pg_collection),
        dump_param_to_param_group_map,
    )


def build_optimizer(
    kind: type[OptimizerT],
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    groups: ParallelGroups,
    report_file: str | None = None,
) -> OptimizerT:
    """Build an optimizer of one class for wrapped chunks.

    Args:
        kind: the class; an integration has its own.
        config: settings.
        model_chunks: wrapped chunks.
        overrides: settings of the parameters that a key matches; see `get_megatron_optimizer`.
        groups: the groups that the chunks were wrapped with.
        report_file: a file that rank 0 writes the routing report to.

    Collective: see `build_runtime`; every rank calls it with the same settings.

    Raises:
        ConfigError: a setting, a tag or the model cannot be honoured.
        PlanMismatchError: ranks hold different models or settings.
    """
    chunks = attempt(lambda: _checked(config, model_chunks, groups), groups.world)

    def resolve_backend(device: torch.device) -> AdamBackend:
        return resolve_adam_backend(config.adam_backend, device, load_fused_adam)

    def rebuild(explicit: Sequence[ExplicitGroup]) -> Runtime:
        return build_runtime(config, chunks, groups, overrides, resolve_backend, explicit)

    optimizer = kind(config, chunks, groups, rebuild)
    if report_file is not None:
        report = Path(report_file)
        attempt(lambda: _write(report, optimizer.routing_report(), groups), groups.world)
    return optimizer


def _groups(
    model_chunks: Sequence[nn.Module], pg_collection: ParallelGroups | None
) -> ParallelGroups:
    """The groups given, or else those that the chunks were wrapped with."""
    if isinstance(pg_collection, ParallelGroups):
        return pg_collection
    if pg_collection is not None:
        raise ConfigError(
            f"pg_collection is a {type(pg_collection).__name__}; pass a "
            "megatron_lw.ParallelGroups, say from ParallelGroups.from_torch"
        )
    for chunk in [] if isinstance(model_chunks, nn.Module) else model_chunks:
        if isinstance(chunk, DistributedDataParallel):
            return chunk.groups
    raise ConfigError(
        "model_chunks must be a list of modules wrapped in megatron_lw.DistributedDataParallel"
    )


def _write(path: Path, report: str, groups: ParallelGroups) -> None:
    if groups.world.rank == 0:
        path.write_text(report + "\n")


def _checked(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module], groups: ParallelGroups
) -> list[DistributedDataParallel]:
    """The chunks, once model, groups and settings are known to fit together."""
    chunks = _wrapped(model_chunks)
    _check_overlap(config, chunks)
    _check_groups(chunks, groups)
    return chunks


def _wrapped(model_chunks: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """The chunks, once each is known to be wrapped by us and to agree on its settings."""
    if isinstance(model_chunks, nn.Module):
        raise ConfigError("model_chunks must be a list of wrapped modules: pass [model]")
    chunks: list[DistributedDataParallel] = []
    for index, chunk in enumerate(model_chunks):
        if not isinstance(chunk, DistributedDataParallel):
            raise ConfigError(
                f"model_chunks[{index}] is a {type(chunk).__name__}, not wrapped: wrap it in "
                "megatron_lw.DistributedDataParallel(module, groups) first"
            )
        chunks.append(chunk)
    if not chunks:
        raise ConfigError("model_chunks is empty: pass at least one wrapped module")
    if any(chunk.ddp_config != chunks[0].ddp_config for chunk in chunks):
        raise ConfigError("model_chunks are wrapped with different DDPConfig settings")
    return chunks


def _check_overlap(config: OptimizerConfig, chunks: Sequence[DistributedDataParallel]) -> None:
    """The wrapper decides whether gathers overlap; a configuration that says more is refused."""
    if config.overlap_param_gather and not chunks[0].ddp_config.overlap_param_gather:
        raise ConfigError(
            "OptimizerConfig.overlap_param_gather=True but DDPConfig.overlap_param_gather=False; "
            "set both, or only the one in DDPConfig"
        )


def _check_groups(chunks: Sequence[DistributedDataParallel], groups: ParallelGroups) -> None:
    """Refuse groups that the chunks were not wrapped with."""
    if any(chunk.groups is not groups for chunk in chunks):
        raise ConfigError(
            "pg_collection is not the ParallelGroups that the model chunks were wrapped with"
        )
