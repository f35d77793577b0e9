"""`install(ddp=False)`: Megatron's own DDP stays, and our optimizer steps what it has all-reduced.

Megatron's wrapper keeps forward, backward, accumulation and `finalize_model_grads`. After it every
rank has whole gradients; a step copies this rank's rows of them, and everything from there on is
ours. That is synchronous, costs the traffic of an all-reduce, and a second gradient storage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_lw.ddp_config import DDPConfig
from megatron_lw.distributed import ddp
from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.errors import ConfigError
from megatron_lw.groups import ParallelGroups
from megatron_lw.integrations.megatron import settings
from megatron_lw.integrations.megatron.api import build_from_megatron, name_chunks, refuse_model
from megatron_lw.integrations.megatron.groups import parallel_groups
from megatron_lw.integrations.megatron.optimizer import MegatronOptimizer
from megatron_lw.optimizer.describe import bind_main_grad
from megatron_lw.optimizer.names import NameMap

# Fields of Megatron's DistributedDataParallelConfig that its wrapper honours by itself.
_LEFT_TO_MEGATRON = (
    "grad_reduce_in_fp32",
    "bucket_size",
    "num_buckets",
    "average_in_collective",
    "check_for_large_grads",
)


class AdoptedChunk(ddp.DistributedDataParallel):
    """Our buckets for a chunk that Megatron's DDP wraps: weights are in them, gradients are not.

    Args:
        theirs: the chunk, wrapped by Megatron; it keeps its hooks and gradient buffers.
        groups: every process group by name.
        names: local to global parameter names.
    """

    def __init__(self, theirs: MegatronDDP, groups: ParallelGroups, names: NameMap) -> None:
        super().__init__(theirs.module, groups, DDPConfig(), names=names)
        self._main_grads = {
            id(param): param.main_grad
            for param in theirs.module.parameters()
            if param.requires_grad
        }

    def attach(
        self, buckets: Sequence[BucketBuffer], after: ddp.DistributedDataParallel | None = None
    ) -> None:
        """Take the buckets; `main_grad` stays the view of Megatron's buffer."""
        super().attach(buckets, after)
        for bucket in buckets:
            for param in bucket.params.values():
                bind_main_grad(param, self._main_grads[id(param)])

    def take_gradients(self) -> None:
        """Copy this rank's rows of the gradients that Megatron has finished.

        Raises:
            StateError: they were used by a step already.
        """
        # First: whatever fails here, no collective of ours may start for these gradients.
        self._started = self._reduced = self.finalized = True
        for bucket in self.buckets:
            bucket.begin_reduce()
            row = bucket.grad_row
            for name, slot in bucket.row_slots():
                grad = self._main_grads[id(bucket.params[name])].reshape(-1)
                part = grad[slot.param_start : slot.param_start + slot.numel]
                row[slot.row_start : slot.row_start + slot.numel].copy_(part)
            bucket.end_reduce()

    def _land_gradient(self, bucket: BucketBuffer, name: str) -> Callable[[torch.Tensor], None]:
        """Megatron's hook lands it."""
        return lambda _: None


class AdoptingOptimizer(MegatronOptimizer):
    """The optimizer beside Megatron's DDP: the rows come from Megatron's gradient buffers."""

    def _reduce(self, kept: Kept) -> None:
        for chunk in self.model_chunks:
            if isinstance(chunk, AdoptedChunk):
                with kept.keeping("before the step"):
                    chunk.take_gradients()
        super()._reduce(kept)


def adopt_megatron_ddp(
    config: Any,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[Any, Mapping[str, Any]] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """`get_megatron_optimizer` for chunks in Megatron's own DDP, which all-reduces the gradients.

    Args:
        config: Megatron's `OptimizerConfig`; it is not changed.
        model_chunks: wrapped by Megatron's `DistributedDataParallel`.
        config_overrides: settings of the parameters that a key of Megatron's matches.
        use_gloo_process_groups: has no effect.
        pg_collection: Megatron's groups; those of `parallel_state` if None.
        dump_param_to_param_group_map: a file that rank 0 writes the routing report to.

    Collective: see `parallel_groups` and `build_runtime`; every rank calls it.

    Raises:
        ConfigError: a setting or the model cannot be honoured; every such flag is named.
        PlanMismatchError: ranks hold different models or settings.
    """
    problems = list(_problems(config, model_chunks))
    if problems:
        raise ConfigError(
            "with install(ddp=False) Megatron's DDP all-reduces BF16 or FP32 gradients, and "
            f"nothing overlaps: {'; '.join(problems)}; or call install()"
        )
    given = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    groups = parallel_groups(given)
    wrapped: Sequence[Any] = model_chunks
    for chunk in wrapped:
        refuse_model(chunk.config)
    inside = [chunk.module for chunk in wrapped]
    maps = name_chunks(inside, wrapped[0].config, groups, given.dp_cp)
    chunks = [
        AdoptedChunk(chunk, groups, names) for chunk, names in zip(wrapped, maps, strict=True)
    ]
    return build_from_megatron(
        AdoptingOptimizer,
        config,
        chunks,
        groups,
        config_overrides,
        dump_param_to_param_group_map,
        named=model_chunks,
    )


def _problems(config: Any, model_chunks: Sequence[nn.Module]) -> Iterator[str]:
    """What is not synchronous training with all-reduced BF16 or FP32 gradients."""
    if config.fp16:
        yield "drop --fp16"
    if not model_chunks:
        yield "model_chunks is empty: pass at least one wrapped module"
    for index, chunk in enumerate(model_chunks):
        if type(chunk) is not MegatronDDP:
            yield (
                f"model_chunks[{index}] is a {type(chunk).__name__}: drop --use-megatron-fsdp and "
                "--use-torch-fsdp2"
            )
            return
    if model_chunks:
        yield from _changed(model_chunks[0].ddp_config)


def _changed(ddp_config: Any) -> Iterator[str]:
    """Fields of Megatron's configuration that ask its wrapper for something else."""
    for field in dataclasses.fields(ddp_config):
        value = getattr(ddp_config, field.name)
        if value != settings.default_of(field) and not _is_harmless(field.name):
            yield f"drop --{field.name.replace('_', '-')} ({field.name}={value!r})"


def _is_harmless(name: str) -> bool:
    """Whether a field may have any value; one that this version does not know may not."""
    known = DDPConfig.FIELD_STATUS.get(name)
    unread = known is not None and known.status == "no_effect"
    return name in _LEFT_TO_MEGATRON or (unread and name != "use_distributed_optimizer")
