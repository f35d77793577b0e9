"""Our state as Megatron's sharded tensors: keys, boxes and replicas are the model's own.

    optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight     the master
    optimizer.state.momentum_buffer. ...                                Muon's momentum
    optimizer.state.exp_avg. ..., optimizer.state.exp_avg_sq. ...       Adam's moments

Megatron's DistributedOptimizer has `param` for the master.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from megatron_lw.dist_checkpointing.manifest import MASTER
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.children.base import OwnedState
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

MASTERS = ("fp32_param", "param")
_STATES: Mapping[str, str] = MappingProxyType({"momentum": "momentum_buffer"})
_PREFIX = "optimizer.state."
_CHAINED = ("", "chained_0.", "chained_1.", "chained_2.", "chained_3.")
"""What Megatron puts before the keys of optimizers in a chain, with `dp_reshardable` state."""

Entry: TypeAlias = "ShardedTensor | ShardedTensorFactory"
"""What the model's own sharded state dict has for a parameter."""


def model_entries(
    optimizer: LayerWiseDistributedOptimizer, model_state: Mapping[str, Any]
) -> dict[str, Entry]:
    """What the model's own sharded state dict has for each parameter that is stepped, by name.

    Args:
        optimizer: names and parameters.
        model_state: of all chunks, in any nesting, made with `keep_vars`.

    Raises:
        CheckpointError: a parameter is not in it.
    """
    tensors, _ = extract_sharded_tensors_and_factories(dict(model_state))
    by_id = {id(each.data): each for each in nested_values(tensors)}
    found: dict[str, Entry] = {}
    for name, param in optimizer.runtime.model.params.items():
        entry = by_id.get(id(param))
        if entry is None:
            raise CheckpointError(
                f"parameter {name!r} is not in the model's sharded state dict; make that of the "
                "chunks that this optimizer steps, with the parameters themselves (keep_vars)"
            )
        found[name] = entry
    return found


def state_name(key: str, *, apart: bool) -> str:
    """What Megatron calls a state.

    Args:
        key: "master" or a state key of a child.
        apart: whether Megatron's DistributedOptimizer would step the parameter.
    """
    return MASTERS[apart] if key == MASTER else _STATES.get(key, key)


def sharded(
    entry: Entry,
    state: str,
    data: torch.Tensor,
    copy: int,
    *,
    everywhere: bool = False,
    prefix: str = "",
) -> Entry:
    """A state, divided like the parameter.

    Args:
        entry: the model's; its replica is (pipeline, tensor, data parallel).
        state: Megatron's name of the state.
        data: fp32, of the parameter's local shape or flat.
        copy: 0: this is the one that is written; else another copy of it, for a load.
        everywhere: whether the rows are spread over tensor-parallel ranks, too.
        prefix: before the key.
    """
    key = f"{prefix}{_PREFIX}{state}.{entry.key}"
    replica = entry.replica_id
    if isinstance(replica, int):
        replica = copy
    else:
        kept = replica[:1] + (0,) * len(replica[1:-1]) if everywhere else replica[:-1]
        replica = (*kept, copy)
    shaped = data.view(entry.data.shape)
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, key=key, data=shaped, replica_id=replica)
    return replace(entry, key=key, data=shaped, dtype=data.dtype, replica_id=replica)


def sharded_owned(state: OwnedState, data: torch.Tensor, copy: int) -> ShardedTensor:
    """A state that its owner alone has, such as a second moment of rows, under a key of ours.

    Args:
        state: which part of which logical tensor it is.
        data: its elements.
        copy: 0: this is the one that is written.
    """
    parts = tuple(
        whole // part if part else 1
        for whole, part in zip(state.global_shape, data.shape, strict=True)
    )
    return ShardedTensor(
        key=owned_key(state),
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=state.global_shape,
        global_offset=state.start,
        axis_fragmentations=parts,
        replica_id=(copy, 0, 0),
    )


def owned_key(state: OwnedState) -> str:
    """The key of `sharded_owned`."""
    return f"{_PREFIX}{state.key}.{state.param}"


class SavedKeys:
    """The keys that a checkpoint has.

    Args:
        directory: the checkpoint; None if it is not known, and then every key is taken to be there.
    """

    def __init__(self, directory: str | None) -> None:
        self._dtypes: dict[str, torch.dtype | None] | None = None
        if directory is not None:
            found = load_sharded_metadata(directory).values()
            self._dtypes = {
                each.key: each.dtype if isinstance(each, ShardedTensor) else None for each in found
            }

    def __contains__(self, key: str) -> bool:
        return self._dtypes is None or key in self._dtypes

    def prefix(self, entry: Entry, state: str) -> str | None:
        """What stands before the key of a state; None if it was not saved."""
        for prefix in _CHAINED:
            probe = sharded(entry, state, entry.data.detach(), 0, prefix=prefix)
            if all(each.key in self for each in _tensors(probe)):
                return prefix
        return None

    def states(self, entry: Entry) -> set[str]:
        """Names of the states of a parameter that were saved, the master aside."""
        ends = {each.key for each in _tensors(entry)}
        found = (key.partition(_PREFIX)[2].partition(".") for key in self._dtypes or ())
        return {state for state, _, name in found if name in ends and state not in MASTERS}

    def weight_is_fp32(self, entry: Entry) -> bool:
        """Whether the weight itself was saved in fp32, so that it is the master, too."""
        keys = [each.key for each in _tensors(entry)]
        return self._dtypes is not None and all(
            self._dtypes.get(key) == torch.float32 for key in keys
        )

    def in_buckets(self) -> bool:
        """Whether a DistributedOptimizer wrote its state by buckets, which only it can read."""
        return any("optimizer.distributed.dp_group_idx_" in key for key in self._dtypes or ())


def _tensors(entry: Entry) -> Iterator[ShardedTensor]:
    if isinstance(entry, ShardedTensorFactory):
        yield from nested_values(entry.build())
    else:
        yield entry
