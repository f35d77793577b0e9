"""What Megatron's `torch_dist` checkpoints save of the optimizer.

It is what Megatron's own optimizers write with `--dist-ckpt-optim-fully-reshardable`: each state
divided like the parameter, so that any data, tensor, pipeline and expert parallel size loads it.
What Megatron has no place for (states that only an owner has, the state of our loss scaler) lies
beside it, where its optimizers pass it over. `checkpoint_load.py` is the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from megatron_lw.child_names import MATRIX_CHILDREN
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.finalize import meet_in_reduces
from megatron_lw.integrations.megatron import assembly, saved_groups
from megatron_lw.integrations.megatron.sharding import (
    Entry,
    model_entries,
    owned_key,
    sharded,
    sharded_owned,
    state_name,
)
from megatron_lw.optimizer.children.base import OwnedState
from megatron_lw.optimizer.held import Held, held_buckets
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

FORMAT = "megatron_lw"
"""In the content metadata of a checkpoint that we wrote: the version of what is ours in it."""
OURS = "megatron_lw"
"""In what the first optimizer saved: what is ours and no tensor."""
TENSORS = "megatron_lw_tensors"
"""In the optimizer's part of a sharded state dict: all tensors. Megatron keeps them by key."""
_SHARDING = "distrib_optim_sharding_type"
_RESHARDABLE = "fully_reshardable"


def save_state(
    optimizer: LayerWiseDistributedOptimizer,
    model_state: Mapping[str, Any],
    metadata: MutableMapping[str, Any] | None,
    *,
    apart: bool,
) -> dict[Any, Any]:
    """The optimizer's part of a sharded state dict.

    Args:
        optimizer: it is not changed.
        model_state: the model's part, of all chunks.
        metadata: Megatron's content metadata; gets the format of what is written.
        apart: as `state_name`, for element-wise children.

    Collective: see `assembly.assemble`; gathers of small objects over `groups.control`.

    Raises:
        CheckpointError: on every rank: a parameter is not in the model's part.
        StateError: on every rank: a step failed half-way.
    """
    metadata = {} if metadata is None else metadata

    def collect() -> dict[str, Entry]:
        optimizer.settle()
        return model_entries(optimizer, model_state)

    entries = attempt(collect, optimizer.groups.control)
    meet_in_reduces(optimizer.model_chunks, optimizer.groups.control)
    is_distributed = _SHARDING in metadata
    if is_distributed:
        metadata[_SHARDING] = _RESHARDABLE
    metadata[FORMAT] = 1
    tensors: dict[str, Any] = {}
    for held in held_buckets(optimizer.runtime):
        spread = held.domain == "replicated"
        for name, key, data in assembly.assemble(held):
            state = state_name(key, apart=apart and is_scalar(optimizer, held))
            tensors[f"{key}/{name}"] = sharded(
                entries[name], state, _kept(data), 0, everywhere=spread
            )
    for owned, copy in owned_states(optimizer):
        data = _kept(owned.tensor)
        tensors[f"{owned_key(owned)}/{owned.start}"] = sharded_owned(owned, data, copy)
    written = _written(optimizer, is_distributed)
    return {**written, TENSORS: tensors} if tensors else written


def is_scalar(optimizer: LayerWiseDistributedOptimizer, held: Held) -> bool:
    """Whether Megatron's layer-wise optimizer would not have a bucket: its main Lion is there."""
    main = optimizer.config.optimizer
    return held.kind not in MATRIX_CHILDREN and (main in ("adam", "sgd") or held.kind != main)


def owned_states(optimizer: LayerWiseDistributedOptimizer) -> list[tuple[OwnedState, int]]:
    """What this rank owns that is no row, and which copy of it this is.

    A tied weight has an owner on two stages, and the first, copy 0, writes.
    """
    children = {id(held.child): held.child for held in held_buckets(optimizer.runtime)}
    tied = {r.info.name for r in optimizer.runtime.routing.routes if r.info.tied is not None}
    return [
        (state, optimizer.groups.embedding.rank if state.param in tied else 0)
        for child in children.values()
        for state in child.owned_states()
    ]


def _written(optimizer: LayerWiseDistributedOptimizer, is_distributed: bool) -> dict[Any, Any]:
    """What of the checkpoint is no tensor, the same on every rank.

    Collective: an all-gather of values that owners have over `groups.control`.
    """
    config, held = optimizer.config, held_buckets(optimizer.runtime)
    here = {name: dict(v) for each in held for name, v in each.child.owned_values().items()}
    counted = {each.kind: each.child.num_steps for each in held}
    gathered = all_gather_objects((here, counted), optimizer.groups.control)
    values: dict[str, dict[str, Any]] = {}
    steps: dict[str, int] = {}
    for of_rank, counts in gathered:
        steps |= counts
        for name, of_param in of_rank.items():
            values.setdefault(name, {}).update(of_param)
    layer_wise = is_distributed and config.optimizer not in ("adam", "sgd")
    groups = saved_groups.written_groups(
        optimizer.param_groups, config, steps, layer_wise=layer_wise
    )
    scaler = optimizer.loss_scaler.state()
    theirs = scaler if scaler["kind"] == "dynamic" else None
    flat = not (is_distributed or config.bf16 or config.fp16)
    parts = [saved_groups.written_optimizer(g, flat=flat, scaler=theirs) for g in groups]
    parts[0][OURS] = {"values": values, "loss_scaler": scaler}
    return dict(enumerate(parts)) if len(parts) > 1 else parts[0]


def _kept(data: torch.Tensor) -> torch.Tensor:
    """A copy of host memory, which Megatron would write while training goes on.

    Device memory it copies itself, before that.
    """
    return data.clone() if data.device.type == "cpu" else data
