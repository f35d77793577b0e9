"""What `megatron.training` and the pipeline schedules call on the optimizer and on a model chunk.

Found by reading megatron-core 0.19.2; `tests/megatron/test_surface.py` has one test a member, on
our `MegatronOptimizer` and `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

StepTriple = tuple[bool, float | None, int | None]


class OptimizerSurface(Protocol):
    """The optimizer, as the loop, the scheduler and checkpointing see it."""

    param_groups: list[dict[str, Any]]
    """Written by `OptimizerParamScheduler`, read for logging."""
    config: Any
    """The settings."""
    is_stub_optimizer: bool
    """Whether this rank has no part in saving and loading."""
    grad_norms_by_group: dict[str, float]
    """Norms of parameters that are clipped apart."""

    @property
    def chained_optimizers(self) -> Sequence[Any]:
        """The optimizers inside."""

    @property
    def optimizer(self) -> Any:
        """What holds `param_groups`."""

    def step(self) -> StepTriple:
        """Updated or not, norm, zero count. The loop may put a wrapper in its place."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before the forward of a step."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`config.grad_scale_func` of the schedules."""

    def get_loss_scale(self) -> torch.Tensor:
        """Logged."""

    def get_parameters(self) -> list[nn.Parameter]:
        """The parameters that are stepped."""

    def prepare_model_params_for_param_sync(self) -> None:
        """Before a parameter sync outside of a step."""

    def reload_model_params(self, state_dict: Any = None) -> None:
        """After weights were loaded without optimizer state."""

    def state_dict(self) -> dict[str, Any]:
        """Checkpoints other than `torch_dist`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The counterpart, for every format."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """`torch_dist` checkpoints."""

    def save_parameter_state(self, filename: str) -> None:
        """The `torch` format with a distributed optimizer."""

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """The counterpart."""

    def save_state_dict_to_file(self, filename: str) -> None:
        """The `torch` format with a layer-wise optimizer."""

    def load_state_dict_from_file(self, filename: str) -> None:
        """The counterpart."""

    def offload_to_cpu(self) -> None:
        """Between phases of reinforcement learning."""

    def restore_from_cpu(self) -> None:
        """The counterpart."""


class ChunkSurface(Protocol):
    """A wrapped model chunk, as the loop and the schedules see it."""

    module: nn.Module
    """What `unwrap_model` goes on with."""
    config: Any
    """The model configuration, found by `get_model_config`."""
    force_all_reduce: bool
    """Set by the loop for a step whose whole gradients are saved."""

    @property
    def ddp_config(self) -> Any:
        """Read by `finalize_model_grads`."""

    @property
    def buffers(self) -> Sequence[Any]:
        """Dense gradient buffers."""

    @property
    def expert_parallel_buffers(self) -> Sequence[Any]:
        """Expert gradient buffers."""

    @property
    def remove_forward_pre_hook_handles(self) -> Mapping[nn.Module, Any]:
        """Not empty while the hooks that wait for weights are on."""

    def zero_grad_buffer(self) -> None:
        """Before the forward of a step."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Around all micro-batches of a step but the last."""

    def start_grad_sync(self, *unused: Any) -> None:
        """`config.grad_sync_func` of the schedules."""

    def finish_grad_sync(self, *, force_all_reduce: bool | None = False) -> None:
        """In `finalize_model_grads`."""

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """In `finalize_model_grads`, by tokens."""

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """`config.param_sync_func` of the schedules; before saving."""

    def enable_forward_pre_hook(self) -> None:
        """After the first step, and after evaluation and saving."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Before the first step, and before evaluation and saving."""

    def free_overlap_buffers(self) -> None:
        """Before saving."""

    def broadcast_params(self) -> None:
        """After wrapping, with `--data-parallel-random-init`."""

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Checkpoints other than `torch_dist`."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Any = None
    ) -> Any:
        """`torch_dist` checkpoints."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Loading a checkpoint."""


class ParamSurface(Protocol):
    """A trainable parameter, as layers, statistics and fused kernels see it."""

    main_grad: torch.Tensor
    """Where gradients are accumulated."""
    grad_added_to_main_grad: bool
    """Set by layers that accumulate by themselves."""
    main_param: torch.Tensor | None
    """fp32: this rank's masters of it, None without any; read for --log-params-norm."""
    main_param_sharded: bool
    """Whether other ranks have the rest."""
