"""The optimizer in Megatron's `torch_dist` checkpoints, its own and those of Megatron's optimizers.

What is written is what Megatron's own optimizers write with `--dist-ckpt-optim-fully-reshardable`:
each state divided like the parameter, so that any data, tensor, pipeline and expert parallel size
loads it. What Megatron has no place for (states that only an owner has, the state of our loss
scaler) lies beside it, where its optimizers pass it over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_lw.dist_checkpointing.load import CheckpointWarning
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.errors import CheckpointError
from megatron_lw.integrations.megatron import assembly, saved_groups
from megatron_lw.integrations.megatron.sharding import (
    MASTER,
    MASTERS,
    Entry,
    SavedKeys,
    model_entries,
    owned_key,
    sharded,
    sharded_owned,
    state_name,
)
from megatron_lw.optimizer.children.base import OwnedState
from megatron_lw.optimizer.held import Held, held_buckets
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

DIRECTORY = "megatron_lw_directory"
"""In the content metadata of a checkpoint that is being loaded: where it is."""
FORMAT = "megatron_lw"
"""In the content metadata of a checkpoint that we wrote: the version of what is ours in it."""
_SHARDING = "distrib_optim_sharding_type"
_RESHARDABLE = "fully_reshardable"
_OURS = "megatron_lw"
_TENSORS = "megatron_lw_tensors"
_PLAN = "megatron_lw_plan"
_REMEDY = "load with --no-load-optim to take the weights alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What becomes of what this rank holds, decided before anything is read.

    Attributes:
        is_ours: whether we wrote the checkpoint.
        fresh: parameters of which states start anew, since another child stepped them.
        from_weights: parameters whose weight was saved in fp32 and is the master.
    """

    is_ours: bool
    fresh: frozenset[str]
    from_weights: frozenset[str]


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
    control = optimizer.groups.control
    metadata = {} if metadata is None else metadata

    def collect() -> dict[str, Entry]:
        optimizer.settle()
        return model_entries(optimizer, model_state)

    entries = attempt(collect, control)
    is_distributed = _SHARDING in metadata
    if is_distributed:
        metadata[_SHARDING] = _RESHARDABLE
    metadata[FORMAT] = 1
    tensors: dict[str, Any] = {}
    for held in held_buckets(optimizer.runtime):
        spread = held.domain == "replicated"
        for name, key, data in assembly.assemble(held):
            state = state_name(key, apart=apart and _is_elementwise(held))
            tensors[f"{key}/{name}"] = sharded(
                entries[name], state, _kept(data), 0, everywhere=spread
            )
    for owned in _owned(optimizer):
        copy = _owned_copy(optimizer, owned)
        data = _kept(owned.tensor)
        tensors[f"{owned_key(owned)}/{owned.start}"] = sharded_owned(owned, data, copy)
    written = _written(optimizer, is_distributed)
    return {**written, _TENSORS: tensors} if tensors else written


def load_targets(
    optimizer: LayerWiseDistributedOptimizer,
    model_state: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    *,
    apart: bool,
) -> dict[Any, Any]:
    """What Megatron is to read for this rank; nothing of the optimizer is written yet.

    Args:
        optimizer: it is not changed.
        model_state: the model's part, of all chunks.
        metadata: content metadata of the checkpoint, with its directory if that is known.
        apart: as `state_name`, for element-wise children; used where the directory is not known.

    Collective: gathers of small objects over `groups.control`.

    Raises:
        CheckpointError: on every rank: the checkpoint lacks what the optimizer needs.
    """
    control = optimizer.groups.control
    metadata = metadata or {}
    if optimizer.saver is not None:
        optimizer.saver.join()

    def collect() -> tuple[dict[str, Any], LoadPlan]:
        entries = model_entries(optimizer, model_state)
        saved = SavedKeys(metadata.get(DIRECTORY))
        return _targets(optimizer, entries, saved, apart, FORMAT in metadata)

    tensors, plan = attempt(collect, control)
    _tell_fresh(optimizer, plan)
    wanted: dict[Any, Any] = {_PLAN: LocalNonpersistentObject(plan)}
    return {**wanted, _TENSORS: tensors} if tensors else wanted


def finish_load(optimizer: LayerWiseDistributedOptimizer, state: Mapping[Any, Any]) -> None:
    """Take up what Megatron has read, and publish the weights.

    Args:
        optimizer: filled: masters, states, step counts, settings of the groups, loss scale.
        state: what `load_targets` asked for, and what of the checkpoint is no tensor.

    Collective: gathers over `groups.control`, then one all-gather a bucket over its reduce group.

    Raises:
        CheckpointError: on every rank: the state was not asked for by `load_targets`, or a value in
            it is impossible.
    """
    control = optimizer.groups.control

    def check() -> LoadPlan:
        plan = state.get(_PLAN)
        if not isinstance(plan, LoadPlan):
            raise CheckpointError(
                "load_state_dict() takes what Megatron loaded for sharded_state_dict(..., "
                "is_loading=True) of this optimizer; use --ckpt-format torch_dist"
            )
        return plan

    plan = attempt(check, control)
    with optimizer.restoring("a checkpoint of Megatron's", stepped=True):
        attempt(lambda: _fill(optimizer, state.get(_TENSORS, {}), plan), control)
        attempt(lambda: _set(optimizer, state, plan), control)


def _targets(
    optimizer: LayerWiseDistributedOptimizer,
    entries: Mapping[str, Entry],
    saved: SavedKeys,
    apart: bool,
    is_ours: bool,
) -> tuple[dict[str, Any], LoadPlan]:
    tensors: dict[str, Any] = {}
    fresh: set[str] = set()
    from_weights: set[str] = set()
    missing: list[str] = []
    for held in held_buckets(optimizer.runtime):
        rank, spread = held.bucket.group.rank, held.domain == "replicated"
        order = MASTERS[::-1] if apart and _is_elementwise(held) else MASTERS
        for place in assembly.spreads(held):
            if rank not in place.slots:
                continue
            entry = entries[place.name]
            copy = (rank - place.writer) % held.bucket.group.size
            for key in held.rows:
                names = order if key == MASTER else (state_name(key, apart=False),)
                options = ((name, saved.prefix(entry, name)) for name in names)
                found = next(((n, p) for n, p in options if p is not None), None)
                if found is not None:
                    data = held.master.row.new_zeros(place.numel)
                    tensors[f"{key}/{place.name}"] = sharded(
                        entry, found[0], data, copy, everywhere=spread, prefix=found[1]
                    )
                elif key == MASTER and saved.weight_is_fp32(entry):
                    from_weights.add(place.name)
                elif key != MASTER and saved.states(entry):
                    fresh.add(place.name)
                else:
                    missing.append(f"{key} of {place.name!r}")
    for state in _owned(optimizer):
        if owned_key(state) in saved:
            data, copy = torch.zeros_like(state.tensor), _owned_copy(optimizer, state)
            tensors[f"{owned_key(state)}/{state.start}"] = sharded_owned(state, data, copy)
        else:
            fresh.add(state.param)
    if missing:
        raise CheckpointError(_missing(missing, saved))
    return tensors, LoadPlan(
        is_ours=is_ours, fresh=frozenset(fresh), from_weights=frozenset(from_weights)
    )


def _missing(missing: Sequence[str], saved: SavedKeys) -> str:
    if saved.in_buckets():
        return (
            "the checkpoint holds state of Megatron's DistributedOptimizer by its buckets, which "
            "only the same layout can read; save it with --dist-ckpt-optim-fully-reshardable, or "
            f"{_REMEDY}"
        )
    rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"the checkpoint has no {', '.join(missing[:3])}{rest}; {_REMEDY}"


@torch.no_grad()
def _fill(
    optimizer: LayerWiseDistributedOptimizer, tensors: Mapping[str, torch.Tensor], plan: LoadPlan
) -> None:
    params = optimizer.runtime.model.params
    for held in held_buckets(optimizer.runtime):
        for name, _ in held.bucket.row_slots():
            for key, row in held.rows.items():
                found = tensors.get(f"{key}/{name}")
                if found is not None:
                    assembly.fill(held, key, name, found)
                elif key == MASTER:
                    assembly.fill(held, key, name, params[name].detach())
                else:
                    assembly.fill(held, key, name, row.new_zeros(params[name].shape))
        held.child.restart(plan.fresh)
    for state in _owned(optimizer):
        found = tensors.get(f"{owned_key(state)}/{state.start}")
        if found is not None:
            state.tensor.copy_(found)


def _set(
    optimizer: LayerWiseDistributedOptimizer, state: Mapping[Any, Any], plan: LoadPlan
) -> None:
    """Step counts, settings and loss scale."""
    saved = saved_groups.saved_groups(state, optimizer.config)
    counts = [each.num_steps for each in saved if each.num_steps is not None]
    for held in held_buckets(optimizer.runtime):
        own = [e.num_steps for e in saved if e.child == held.kind and e.num_steps is not None]
        held.child.num_steps = max(own if plan.is_ours and own else counts, default=0)
    lost = []
    for group in optimizer.param_groups:
        found = saved_groups.find_group(group, saved)
        if found is None:
            lost.append(group["name"])
        else:
            group.update(saved_groups.settings_from(group, found))
    if lost:
        _warn(optimizer, f"parameter groups that were not saved keep their settings: {lost}")
    ours = _ours(state) if plan.is_ours else {}
    values = ours.get("values", {})
    for held in held_buckets(optimizer.runtime):
        held.child.load_owned_values(values)
    scaler = ours.get("loss_scaler")
    theirs = saved_groups.grad_scaler(state)
    if scaler is not None and scaler["kind"] == optimizer.loss_scaler.state()["kind"]:
        optimizer.loss_scaler.load(scaler)
    elif theirs is not None and optimizer.loss_scaler.state()["kind"] == "dynamic":
        optimizer.loss_scaler.load({**optimizer.loss_scaler.state(), **theirs})
    elif optimizer.config.fp16:
        _warn(optimizer, "the checkpoint has no such loss scale: it starts as it was configured")


def _ours(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """What we wrote for ourselves: it lies in the first optimizer's part."""
    found: Mapping[str, Any] = state.get(0, state).get(_OURS, {})
    return found


def _written(optimizer: LayerWiseDistributedOptimizer, is_distributed: bool) -> dict[Any, Any]:
    """What of the checkpoint is no tensor, the same on every rank.

    Collective: an all-gather of values that owners have over `groups.control`.
    """
    config, held = optimizer.config, held_buckets(optimizer.runtime)
    here = {name: dict(v) for each in held for name, v in each.child.owned_values().items()}
    gathered = all_gather_objects(
        (here, {each.kind: each.child.num_steps for each in held}), optimizer.groups.control
    )
    values: dict[str, dict[str, Any]] = {}
    steps: dict[str, int] = {}
    for of_rank, counted in gathered:
        steps |= counted
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
    parts[0][_OURS] = {"values": values, "loss_scaler": scaler}
    return dict(enumerate(parts)) if len(parts) > 1 else parts[0]


def _is_elementwise(held: Held) -> bool:
    return held.kind in ("adam", "lion", "sgd")


def _owned(optimizer: LayerWiseDistributedOptimizer) -> list[OwnedState]:
    children = {id(held.child): held.child for held in held_buckets(optimizer.runtime)}
    return [state for child in children.values() for state in child.owned_states()]


def _owned_copy(optimizer: LayerWiseDistributedOptimizer, state: OwnedState) -> int:
    """A tied weight has an owner on two stages; the first writes."""
    infos = {route.info.name: route.info for route in optimizer.runtime.routing.routes}
    tied = infos[state.param].tied
    return 0 if tied is None else optimizer.groups.embedding.rank


def _kept(data: torch.Tensor) -> torch.Tensor:
    """Megatron copies device memory before training goes on, and shares host memory: a copy."""
    return data.clone() if data.device.type == "cpu" else data


def _tell_fresh(optimizer: LayerWiseDistributedOptimizer, plan: LoadPlan) -> None:
    gathered = all_gather_objects(sorted(plan.fresh), optimizer.groups.control)
    names = sorted({name for of_rank in gathered for name in of_rank})
    if names:
        _warn(
            optimizer,
            f"states that were not saved for the child of a parameter start anew: {names}",
        )


def _warn(optimizer: LayerWiseDistributedOptimizer, text: str) -> None:
    if optimizer.groups.control.rank == 0:
        warnings.warn(text, CheckpointWarning, stacklevel=2)
