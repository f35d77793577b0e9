"""Our `DistributedDataParallel` with the members that Megatron's loop and schedules use.

It is an instance of Megatron's class, since the loop installs `no_sync` and the hooks only then,
and takes nothing from it: every public member of Megatron's class is defined here or in ours, which
a test holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_lw.ddp_config import DDPConfig
from megatron_lw.distributed import ddp
from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import all_gather_rows
from megatron_lw.errors import StateError
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.describe import frozen_domain
from megatron_lw.optimizer.names import NameMap


class DistributedDataParallel(ddp.DistributedDataParallel, MegatronDDP):  # type: ignore[misc]
    """A model chunk of Megatron's, wrapped by us.

    Gradients that cross groups (sequence parallelism, tied embeddings, tokens) are finished by
    whoever calls `finish_grad_sync`, as in Megatron: its `finalize_model_grads` does, and a step
    without it lets ours do so.

    Args:
        module: the chunk.
        groups: every process group by name.
        config: Megatron's model configuration, or one with the same fields.
        ddp_config: buckets and dtypes.
        names: local to global parameter names.
        scalars_apart: whether Megatron, wrapping it in its own, would give what its layer-wise
            optimizer does not take to a DistributedOptimizer, which names masters otherwise.

    Attributes:
        config: Megatron's model configuration.
        force_all_reduce: whether the next `finish_grad_sync` leaves whole gradients on every rank.
        overlap_param_gather_with_optimizer_step: always False.
        scalars_apart: as given; only names in checkpoints follow from it.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ParallelGroups,
        config: Any,
        ddp_config: DDPConfig,
        names: NameMap,
        *,
        scalars_apart: bool = False,
    ) -> None:
        super().__init__(module, groups, ddp_config, names=names)
        self.config = config
        self.scalars_apart = scalars_apart
        self.force_all_reduce = False
        self.overlap_param_gather_with_optimizer_step = False
        self._gathered_grads = False
        self._pre_hooks = ddp_config.overlap_param_gather
        self._per_token = bool(getattr(config, "calculate_per_token_loss", False))

    @property
    def buffers(self) -> list[BucketBuffer]:  # type: ignore[override]
        """Storage of the dense buckets; Megatron's class has its own buffers under this name."""
        return [bucket for bucket in super().buckets if not _is_expert(bucket)]

    @property
    def expert_parallel_buffers(self) -> list[BucketBuffer]:
        """Storage of the expert buckets."""
        return [bucket for bucket in super().buckets if _is_expert(bucket)]

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reduces that backward has not; the schedules pass parameters, which are unused.

        Collective: one reduce-scatter a bucket over its reduce group.
        """
        super().start_grad_sync()

    def finish_grad_sync(
        self,
        divisor: float | None = None,
        *,
        keep: bool = True,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Reduce the gradients; what crosses groups is then the caller's, as in Megatron.

        With `calculate_per_token_loss` they are summed, and `scale_gradients` divides them.

        Args:
            divisor: see `megatron_lw.DistributedDataParallel.finish_grad_sync`.
            keep: leave a failure of this rank for the step to raise on all: the others wait for the
                collectives that `finalize_model_grads` makes after this one.
            force_all_reduce: leave the whole mean gradient in `main_grad` on every rank, instead of
                this rank's row.

        Collective: see `start_grad_sync`; with `force_all_reduce` an all-gather a bucket, too.
        """
        if divisor is None and self._per_token:
            divisor = 1.0
        super().finish_grad_sync(divisor, keep=keep)
        if (force_all_reduce or self.force_all_reduce) and not self._gathered_grads:
            self._gathered_grads = True
            for bucket in self.buckets:
                all_gather_rows(bucket.grads, bucket.group, label=f"gradients, {bucket.label}")
        self.finalized = True

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply what the gradient storage holds; every rank's rows where they were gathered."""
        if not self._gathered_grads:
            super().scale_gradients(factor)
            return
        for bucket in self.buckets:
            bucket.grads.mul_(factor)

    def zero_grad_buffer(self) -> None:
        """Zero all gradient storage; needed before the backward of each step."""
        self._gathered_grads = False
        super().zero_grad_buffer()

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Publish the masters if they are newer than the weights; the step does so by itself.

        Args:
            *unused: parameters, which the schedules pass.
            force_sync: wait until every weight has arrived.
            force_dispatch: has no effect: what is due has been sent.
        """
        super().start_param_sync()
        if force_sync:
            self.finish_param_sync()

    @property
    def remove_forward_pre_hook_handles(self) -> Mapping[nn.Module, RemovableHandle]:
        """Modules whose forward waits for their weights; empty where nothing does."""
        gather = self._overlapped_gather
        return {} if gather is None or not self._pre_hooks else gather.handles

    def enable_forward_pre_hook(self) -> None:
        """From now on forward waits for weights on their way, module by module."""
        self._pre_hooks = True

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Land every weight now, so that no forward has anything to wait for.

        A later step still publishes behind the forward that follows it, which then waits.

        Args:
            param_sync: publish masters that are newer than the weights first.
        """
        if param_sync:
            self.start_param_sync(force_sync=True)
        self.finish_param_sync()
        self._pre_hooks = False

    def free_overlap_buffers(self) -> None:
        """Land every weight; gathers have no storage of their own that could be freed."""
        self.finish_param_sync()

    def reset_param_sync_dispatch_state(self) -> None:
        """Land every weight: whatever is gathered next starts from there."""
        self.finish_param_sync()

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Refused: gradients keep their storage, and every view its address, for the whole run."""
        raise StateError(
            "offload_grad_buffers(): the gradient storage keeps its address for the whole run; "
            "use optimizer.offload_to_cpu(), which gives back masters and states"
        )

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Zero the gradients; their storage was never given back, see `offload_grad_buffers`."""
        self.zero_grad_buffer()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The wrapped chunk's state dict for Megatron's torch format."""
        self.finish_param_sync()
        module: Any = self.module
        return module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Any = None
    ) -> Any:
        """The wrapped chunk's sharded state dict, without a prefix of ours."""
        self.finish_param_sync()
        module: Any = self.module
        return module.sharded_state_dict(prefix, tuple(sharded_offsets), metadata)


def _is_expert(bucket: BucketBuffer) -> bool:
    """A bucket is of one domain."""
    return frozen_domain(next(iter(bucket.params.values()))) == "expert"
