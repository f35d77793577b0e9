"""Our optimizer with the members that Megatron's loop, scheduler and checkpointing use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from megatron_lw.errors import StateError
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer, StepResult

_NO_CHECKPOINT = (
    "checkpoints of the optimizer inside Megatron are not supported yet; pass --no-save-optim and "
    "--no-load-optim, which keep the model's own"
)


@dataclass(frozen=True, slots=True)
class ChildView:
    """One child as `chained_optimizers` shows it: its groups, and nothing that steps.

    Attributes:
        name: what the child is called.
        param_groups: the groups that it steps; the optimizer's own dictionaries.
    """

    name: str
    param_groups: list[ParamGroup]
    is_stub_optimizer: bool = False

    def get_parameters(self) -> list[nn.Parameter]:
        """The parameters that it steps."""
        return [param for group in self.param_groups for param in group["params"]]


class MegatronOptimizer(LayerWiseDistributedOptimizer):
    """The layer-wise optimizer as Megatron's loop calls it.

    Attributes:
        is_stub_optimizer: always False, also on a stage without trainable parameters: it takes part
            in every collective.
        grad_norms_by_group: norms of parameters that are clipped apart; there are none.
    """

    is_stub_optimizer = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.grad_norms_by_group: dict[str, float] = {}
        self._offloaded: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Itself: there is no optimizer inside that holds other groups."""
        return self

    @property
    def chained_optimizers(self) -> list[ChildView]:
        """The children, by the groups that they step."""
        names = dict.fromkeys(group["optimizer"] for group in self.param_groups)
        return [
            ChildView(name, [g for g in self.param_groups if g["optimizer"] == name])
            for name in names
        ]

    def get_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of this rank, by group."""
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """See `LayerWiseDistributedOptimizer.step`.

        Raises:
            StateError: masters and states are on the host, see `offload_to_cpu`.
        """
        if self._offloaded:
            raise StateError("step(): masters and states are offloaded; call restore_from_cpu()")
        return super().step(closure)

    def prepare_model_params_for_param_sync(self) -> None:
        """Nothing to do: a publish stages what it sends."""

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Set the masters from the model's weights.

        Args:
            state_dict: refused unless None: weights are read from the model.

        Raises:
            StateError: a state dict is given.
        """
        if state_dict is not None:
            raise StateError(
                "reload_model_params(state_dict=...): masters are read from the model; drop "
                "--load-main-params-from-ckpt"
            )
        super().reload_model_params()

    def offload_to_cpu(self) -> None:
        """Move masters and states to the host and give their device memory back.

        A second call does nothing. Nothing may step or publish until `restore_from_cpu`.
        """
        if self._offloaded:
            return
        for chunk in self.model_chunks:
            chunk.finish_param_sync()
        for tensor in self._state_tensors():
            self._offloaded.append((tensor, tensor.to("cpu", copy=True)))
            tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore_from_cpu(self) -> None:
        """Move masters and states back, bit for bit. A second call does nothing."""
        for tensor, host in self._offloaded:
            tensor.untyped_storage().resize_(host.untyped_storage().nbytes())
            tensor.copy_(host)
        self._offloaded = []

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("load_state_dict()")

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("sharded_state_dict()")

    def save_parameter_state(self, filename: str) -> None:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("save_parameter_state()")

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("load_parameter_state()")

    def save_state_dict_to_file(self, filename: str) -> None:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("save_state_dict_to_file()")

    def load_state_dict_from_file(self, filename: str) -> None:
        """Refused until checkpoints inside Megatron are supported."""
        _refuse("load_state_dict_from_file()")

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for publisher in self.runtime.publishers:
            yield publisher.master.row
        for child in self.runtime.children:
            for bucket in range(child.num_buckets):
                yield from child.state_rows(bucket).values()


def _refuse(what: str) -> NoReturn:
    raise StateError(f"{what}: {_NO_CHECKPOINT}")
