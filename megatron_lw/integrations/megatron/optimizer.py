"""Our optimizer with the members that Megatron's loop, scheduler and checkpointing use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from megatron_lw.distributed.agreement import attempt
from megatron_lw.errors import StateError
from megatron_lw.integrations.megatron.checkpoint import save_state
from megatron_lw.integrations.megatron.checkpoint_load import finish_load, load_targets
from megatron_lw.integrations.megatron.ddp import DistributedDataParallel
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

_ONE_FORMAT = (
    "the optimizer is saved in sharded checkpoints only; pass --ckpt-format torch_dist, or keep "
    "the model's own with --no-save-optim and --no-load-optim"
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
        self._show_masters()

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `LayerWiseDistributedOptimizer.add_param_group`; masters lie elsewhere afterwards."""
        super().add_param_group(param_group)
        self._show_masters()

    def _show_masters(self) -> None:
        """Give each parameter its masters in this rank's row, which Megatron's statistics read."""
        for publisher in self.runtime.publishers:
            params: Mapping[str, Any] = publisher.bucket.params
            for param in params.values():
                param.main_param, param.main_param_sharded = None, True
            for name, slot in publisher.bucket.row_slots():
                stop = slot.row_start + slot.numel
                params[name].main_param = publisher.master.row[slot.row_start : stop]

    def get_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of this rank, by group."""
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
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
        self._require_states_here()
        super().reload_model_params()

    def offload_to_cpu(self) -> None:
        """Move masters and states to the host and give their device memory back.

        A second call does nothing. Until `restore_from_cpu` what needs them raises StateError.
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

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: MutableMapping[str, Any] | None = None,
    ) -> dict[Any, Any]:
        """What Megatron's `torch_dist` format saves of the optimizer, or reads for it.

        Args:
            model_sharded_state_dict: that of the model, all chunks, in any nesting.
            is_loading: whether it is to be read into; then `load_state_dict` takes it up.
            metadata: Megatron's content metadata; a save notes in it which format it writes.

        Collective: every rank calls it; see `save_state` and `load_targets`.

        Raises:
            CheckpointError: on every rank: model or checkpoint lacks a parameter of the optimizer.
            StateError: on every rank: states are on the host, or a step failed half-way.
        """
        attempt(self._require_states_here, self.groups.control)
        apart = self._scalars_apart(metadata or {})
        if is_loading:
            return load_targets(self, model_sharded_state_dict, metadata, apart=apart)
        return save_state(self, model_sharded_state_dict, metadata, apart=apart)

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Take up what Megatron has read for `sharded_state_dict(..., is_loading=True)`.

        Masters, states, step counts, settings of the parameter groups and the loss scale are those
        of the checkpoint, and the weights are published from the masters.

        Collective: every rank calls it; see `finish_load`.

        Raises:
            CheckpointError: on every rank: it was read for something else.
        """
        attempt(self._require_states_here, self.groups.control)
        finish_load(self, state_dict)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Refused: the state lies in rows on all ranks, not in one dictionary."""
        _refuse("state_dict()")

    def save_parameter_state(self, filename: str) -> None:
        """Refused: only sharded checkpoints hold the optimizer."""
        _refuse("save_parameter_state()")

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refused: only sharded checkpoints hold the optimizer."""
        _refuse("load_parameter_state()")

    def save_state_dict_to_file(self, filename: str) -> None:
        """Refused: only sharded checkpoints hold the optimizer."""
        _refuse("save_state_dict_to_file()")

    def load_state_dict_from_file(self, filename: str) -> None:
        """Refused: only sharded checkpoints hold the optimizer."""
        _refuse("load_state_dict_from_file()")

    def _scalars_apart(self, metadata: Mapping[str, Any]) -> bool:
        """Whether Megatron's DistributedOptimizer would step what no matrix child takes."""
        distributed = "distrib_optim_sharding_type" in metadata
        alone = self.config.optimizer in ("adam", "sgd")
        apart = all(
            isinstance(chunk, DistributedDataParallel) and chunk.scalars_apart
            for chunk in self.model_chunks
        )
        return distributed and (alone or apart)

    def _require_held(self) -> None:
        super()._require_held()
        self._require_states_here()

    def _require_states_here(self) -> None:
        if self._offloaded:
            raise StateError("masters and states are offloaded; call restore_from_cpu() first")

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for publisher in self.runtime.publishers:
            yield publisher.master.row
        for child in self.runtime.children:
            for bucket in range(child.num_buckets):
                yield from child.state_rows(bucket).values()


def _refuse(what: str) -> NoReturn:
    raise StateError(f"{what}: {_ONE_FORMAT}")
