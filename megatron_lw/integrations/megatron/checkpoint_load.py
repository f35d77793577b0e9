"""The optimizer from Megatron's `torch_dist` checkpoints: ours, and those of Megatron's optimizers.

First it is decided what every rank asks for, by the keys that the checkpoint has; Megatron reads it
into memory of its own; then masters and states are set from there, and the weights published.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_lw.dist_checkpointing.load import CheckpointWarning
from megatron_lw.dist_checkpointing.manifest import MASTER
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.finalize import meet_in_reduces
from megatron_lw.errors import CheckpointError
from megatron_lw.integrations.megatron import assembly, saved_groups
from megatron_lw.integrations.megatron.checkpoint import (
    FORMAT,
    OURS,
    TENSORS,
    is_scalar,
    owned_states,
)
from megatron_lw.integrations.megatron.sharding import (
    MASTERS,
    Entry,
    SavedKeys,
    model_entries,
    owned_key,
    sharded,
    sharded_owned,
    state_name,
)
from megatron_lw.optimizer.held import Held, held_buckets
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

DIRECTORY = "megatron_lw_directory"
"""In the content metadata of a checkpoint that is being loaded: where it is."""
OWN_SCHEDULE = "megatron_lw_own_schedule"
"""Beside it: whether learning rates and weight decay are to be as configured now."""
_PLAN = "megatron_lw_plan"
_REMEDY = "load with --no-load-optim to take the weights alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What becomes of what this rank holds, decided before anything is read.

    Attributes:
        is_ours: whether we wrote the checkpoint.
        own_schedule: whether settings that a schedule goes by stay as they are.
        fresh: parameters of which states start anew, since another child stepped them.
    """

    is_ours: bool
    own_schedule: bool
    fresh: frozenset[str]


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
        metadata: content metadata of the checkpoint, with its directory if that is known; else the
            keys that we would write are asked for.
        apart: as `state_name`, for element-wise children.

    Collective: gathers of small objects over `groups.control`.

    Raises:
        CheckpointError: on every rank: the checkpoint lacks what the optimizer needs.
    """
    control = optimizer.groups.control
    metadata = metadata or {}

    def collect() -> _Targets:
        if optimizer.saver is not None:
            optimizer.saver.join()
        entries = model_entries(optimizer, model_state)
        targets = _Targets(entries, SavedKeys(metadata.get(DIRECTORY)))
        for held in held_buckets(optimizer.runtime):
            targets.ask_for(held, apart=apart and is_scalar(optimizer, held))
        targets.ask_for_owned(optimizer)
        targets.require_all()
        return targets

    found = attempt(collect, control)
    plan = LoadPlan(
        is_ours=FORMAT in metadata,
        own_schedule=bool(metadata.get(OWN_SCHEDULE)),
        fresh=frozenset(found.fresh),
    )
    names = {name for fresh in all_gather_objects(found.fresh, control) for name in fresh}
    if names:
        text = "states that were not saved for the child of a parameter start anew: "
        _warn(optimizer, text + ", ".join(sorted(names)))
    wanted: dict[Any, Any] = {_PLAN: LocalNonpersistentObject(plan)}
    return {**wanted, TENSORS: found.tensors} if found.tensors else wanted


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
    meet_in_reduces(optimizer.model_chunks, control)
    with optimizer.restoring("a checkpoint of Megatron's", stepped=True):
        attempt(lambda: _fill(optimizer, state.get(TENSORS, {}), plan), control)
        attempt(lambda: _set(optimizer, state, plan), control)


class _Targets:
    """What this rank asks for.

    Attributes:
        tensors: where it is read into, by state and parameter.
        fresh: names of parameters of which states start anew.
    """

    def __init__(self, entries: Mapping[str, Entry], saved: SavedKeys) -> None:
        self.tensors: dict[str, Any] = {}
        self.fresh: set[str] = set()
        self._entries = entries
        self._saved = saved
        self._missing: list[str] = []

    def ask_for(self, held: Held, *, apart: bool) -> None:
        """Ask for masters and states of a bucket, each parameter whole if a part of it is here."""
        group = held.bucket.group
        for place in assembly.spreads(held):
            if group.rank not in place.slots:
                continue
            entry, copy = self._entries[place.name], (group.rank - place.writer) % group.size
            for key in held.rows:
                found = self._find(entry, key, apart=apart)
                if found is None:
                    self._do_without(entry, key, place.name)
                    continue
                state, prefix = found
                data = held.master.row.new_zeros(place.numel)
                everywhere = held.domain == "replicated"
                self.tensors[f"{key}/{place.name}"] = sharded(
                    entry, state, data, copy, everywhere=everywhere, prefix=prefix
                )

    def ask_for_owned(self, optimizer: LayerWiseDistributedOptimizer) -> None:
        """Ask for what lies at owners."""
        for owned, copy in owned_states(optimizer):
            if owned_key(owned) not in self._saved:
                self.fresh.add(owned.param)
                continue
            data = torch.zeros_like(owned.tensor)
            self.tensors[f"{owned_key(owned)}/{owned.start}"] = sharded_owned(owned, data, copy)

    def require_all(self) -> None:
        """Raise CheckpointError for what the checkpoint lacks."""
        if not self._missing:
            return
        if self._saved.in_buckets():
            raise CheckpointError(
                "the checkpoint holds state of Megatron's DistributedOptimizer by its buckets, "
                "which only the same layout can read; save it with "
                f"--dist-ckpt-optim-fully-reshardable, or {_REMEDY}"
            )
        rest = len(self._missing) - 3
        more = f" and {rest} more" if rest > 0 else ""
        raise CheckpointError(
            f"the checkpoint has no {', '.join(self._missing[:3])}{more}; {_REMEDY}"
        )

    def _find(self, entry: Entry, key: str, *, apart: bool) -> tuple[str, str] | None:
        """Megatron's name of a state that was saved, and what stands before its key."""
        names: Sequence[str] = (state_name(key, apart=apart),)
        if key == MASTER:
            names = MASTERS[::-1] if apart else MASTERS
        for name in names:
            prefix = self._saved.prefix(entry, name)
            if prefix is not None:
                return name, prefix
        return None

    def _do_without(self, entry: Entry, key: str, name: str) -> None:
        """A weight that was saved in FP32 is the master; what no child kept starts anew."""
        if key == MASTER and self._saved.weight_is_fp32(entry):
            return
        if key != MASTER and self._saved.states(entry):
            self.fresh.add(name)
            return
        self._missing.append(f"{key} of {name!r}")


@torch.no_grad()
def _fill(
    optimizer: LayerWiseDistributedOptimizer, tensors: Mapping[str, torch.Tensor], plan: LoadPlan
) -> None:
    params = optimizer.runtime.model.params
    for held in held_buckets(optimizer.runtime):
        rows = held.rows
        for name, slot in held.bucket.row_slots():
            for key, row in rows.items():
                is_fresh = key != MASTER and name in plan.fresh
                found = None if is_fresh else tensors.get(f"{key}/{name}")
                if found is None and key == MASTER:
                    found = params[name].detach()
                if found is None:
                    found = row.new_zeros(params[name].shape)
                assembly.fill(row, slot, found)
        held.child.restart(plan.fresh)
    for owned, _ in owned_states(optimizer):
        found = tensors.get(f"{owned_key(owned)}/{owned.start}")
        if found is not None:
            owned.tensor.copy_(found)


def _set(
    optimizer: LayerWiseDistributedOptimizer, state: Mapping[Any, Any], plan: LoadPlan
) -> None:
    """Step counts, settings and loss scale."""
    saved = saved_groups.saved_groups(state, optimizer.config)
    ours = _ours(state) if plan.is_ours else {}
    for held in held_buckets(optimizer.runtime):
        held.child.num_steps = saved_groups.steps_of(held.kind, saved, alone=plan.is_ours)
        held.child.load_owned_values(ours.get("values", {}))
    lost = []
    for group in optimizer.param_groups:
        found = saved_groups.find_group(group, saved)
        if found is None:
            lost.append(group["name"])
        else:
            group.update(saved_groups.settings_from(group, found, keep=plan.own_schedule))
    if lost:
        names = ", ".join(lost)
        _warn(optimizer, f"parameter groups that were not saved keep their settings: {names}")
    _set_loss_scale(optimizer, ours.get("loss_scaler"), saved_groups.grad_scaler(state))


def _set_loss_scale(
    optimizer: LayerWiseDistributedOptimizer,
    ours: Mapping[str, Any] | None,
    theirs: Mapping[str, Any] | None,
) -> None:
    present = optimizer.loss_scaler.state()
    if ours is not None and ours["kind"] == present["kind"]:
        optimizer.loss_scaler.load(ours)
    elif theirs is not None and present["kind"] == "dynamic":
        optimizer.loss_scaler.load({**present, **theirs})
    elif optimizer.config.fp16:
        _warn(optimizer, "no loss scale of this kind was saved: it starts as it is configured")


def _ours(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """What we wrote for ourselves: it lies in the first optimizer's part."""
    found: Mapping[str, Any] = state.get(0, state).get(OURS, {})
    return found


def _warn(optimizer: LayerWiseDistributedOptimizer, text: str) -> None:
    if optimizer.groups.control.rank == 0:
        warnings.warn(text, CheckpointWarning, stacklevel=2)
