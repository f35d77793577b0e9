"""What a rank is to save, checked over all ranks: between the optimizer and the files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_lw.dist_checkpointing.copies import assign_writers, check_copies
from megatron_lw.dist_checkpointing.dtypes import raw_bytes
from megatron_lw.dist_checkpointing.entries import Entry, Holdings, holdings, identity
from megatron_lw.dist_checkpointing.frozen import weight_of
from megatron_lw.dist_checkpointing.histories import history_entries
from megatron_lw.dist_checkpointing.manifest import VALUE, ChildRecord
from megatron_lw.dist_checkpointing.merge import RankPart
from megatron_lw.dist_checkpointing.values import Encoded, encode
from megatron_lw.distributed.agreement import attempt
from megatron_lw.errors import CheckpointError, ConfigError
from megatron_lw.optimizer.boxes import Box
from megatron_lw.optimizer.held import held_buckets

if TYPE_CHECKING:
    from megatron_lw.distributed.ddp import DistributedDataParallel
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

EXTRA = "extra/"
"""Tensors of `extra` and of schedulers are named by this and a digest of their content."""
_IDENTITY = frozenset(
    ("params", "name", "optimizer", "is_expert_parallel", "is_decoupled_lr", "default_config")
)


class Stateful(Protocol):
    """Anything with torch's pair of methods, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What this rank is to write.

    Attributes:
        part: all but the pieces and the file, which come with writing.
        entries: the tensors that this rank writes, by name, state and place.
    """

    part: RankPart
    entries: tuple[Entry, ...]


def take_snapshot(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    scheduler: Stateful | None,
    extra: Mapping[str, Any] | None,
    *,
    step: int,
    leave_out: Collection[str] = (),
) -> Snapshot:
    """Collect what this rank saves; its tensors are views, nothing is copied.

    Args:
        model: what the optimizer steps: the wrapped chunk or chunks.
        optimizer: masters, states and settings.
        scheduler: saved by its `state_dict`.
        extra: plain values and tensors by name.
        step: number of the checkpoint.
        leave_out: names of frozen parameters and buffers, as patterns, that are not saved.

    Collective: all-gathers of small objects over `groups.control`, and over the groups that hold
    copies.

    Raises:
        CheckpointError: on every rank: copies that differ, or a value that cannot be saved.
        StateError: on every rank: a step failed half-way.
    """
    groups = optimizer.groups

    def collect() -> tuple[Holdings, list[Entry], RankPart]:
        require_same_model(model, optimizer)
        check_patterns("leave_out", leave_out)
        optimizer.settle()
        held = holdings(optimizer)
        aside = _Aside()
        part = _part(held, optimizer, scheduler, extra or {}, step, aside)
        values = [*_kept(held.values, leave_out), *history_entries(optimizer)]
        return held, [*values, *aside.entries.values()], part

    held, values, part = attempt(collect, groups.control)
    check_copies(held.entries, groups)
    written = (*held.entries, *assign_writers(values, groups.control))
    mine = sorted(
        (entry for entry in written if entry.writes),
        key=lambda entry: (entry.name, entry.state, entry.box.start),
    )
    return Snapshot(part=part, entries=tuple(mine))


def require_same_model(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
) -> None:
    """Check that a model is the one that the optimizer steps.

    Raises:
        ConfigError: it is another one.
    """
    chunks = tuple(model) if isinstance(model, Sequence) else (model,)
    if chunks != optimizer.model_chunks:
        raise ConfigError(
            f"model has {len(chunks)} chunks that are not the {len(optimizer.model_chunks)} which "
            "the optimizer steps; pass what get_megatron_optimizer was given"
        )


def check_patterns(setting: str, value: Collection[str]) -> None:
    """Check a list of names or patterns; of one text alone every letter would be a pattern.

    Raises:
        ConfigError: it is no collection of texts.
    """
    if isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{setting}={value!r}; give a list of names, such as [{value!r}]")


def is_named(patterns: Collection[str], name: str, state: str) -> bool:
    """Whether a tensor is named by one of the patterns, by its name or by `name/state`."""
    name = weight_of(name)
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(f"{name}/{state}", pattern)
        for pattern in patterns
    )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its members and what it is known by."""
    return {key: value for key, value in group.items() if key not in _IDENTITY}


class _Aside:
    """Tensors among values, each once, named by its content; so equal ones are one on all ranks."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def put(self, tensor: torch.Tensor) -> str:
        """Keep a tensor; returns its name."""
        raw = tensor.detach().cpu().contiguous()
        shape = tuple(raw.shape)
        digest = hashlib.blake2b(f"{raw.dtype} {shape} ".encode(), digest_size=16)
        digest.update(raw_bytes(raw).numpy().data)
        name = EXTRA + digest.hexdigest()
        self.entries[name] = Entry(
            name=name,
            state=VALUE,
            shape=shape,
            box=Box((0,) * len(shape), shape),
            tensor=raw,
            copies=(),
            writes=False,
        )
        return name


def _kept(values: Sequence[Entry], leave_out: Collection[str]) -> list[Entry]:
    return [e for e in values if e.state != VALUE or not is_named(leave_out, e.name, e.state)]


def _part(
    held: Holdings,
    optimizer: LayerWiseDistributedOptimizer,
    scheduler: Stateful | None,
    extra: Mapping[str, Any],
    step: int,
    aside: _Aside,
) -> RankPart:
    """Everything that is not a tensor."""

    def encoded(where: str, value: object) -> Encoded:
        return encode(value, put=aside.put, where=where)

    for key in extra:
        if not isinstance(key, str):
            raise CheckpointError(f"extra has the key {key!r}; its keys are names, so use text")
    values = {"loss_scaler": encoded("loss_scaler", optimizer.loss_scaler.state())}
    if scheduler is not None:
        values["scheduler"] = encoded("scheduler", scheduler.state_dict())
    groups = optimizer.groups
    return RankPart(
        rank=groups.world.ranks[groups.world.rank],
        step=step,
        topology=groups.sizes(),
        params=held.params,
        pieces=(),
        rows=held.rows,
        file=None,
        children=_children(optimizer, encoded),
        groups={
            group["name"]: encoded(f"parameter group {group['name']!r}", settings_of(group))
            for group in optimizer.param_groups
        },
        values=values,
        extra={key: encoded(f"extra[{key!r}]", value) for key, value in extra.items()},
    )


def _children(
    optimizer: LayerWiseDistributedOptimizer, encoded: Callable[[str, Any], Encoded]
) -> dict[str, ChildRecord]:
    """Children by kind; those of several domains count their steps alike."""
    found: dict[str, ChildRecord] = {}
    names = {r.info.name: identity(r.info) for r in optimizer.runtime.routing.routes}
    for held in held_buckets(optimizer.runtime):
        values = {
            names[param]: encoded(f"state of {param!r}", dict(of_param))
            for param, of_param in held.child.owned_values().items()
        }
        known = found.get(held.kind)
        found[held.kind] = ChildRecord(
            num_steps=held.child.num_steps,
            state_keys=tuple(held.child.state_keys),
            values={**(known.values if known else {}), **values},
        )
    return found
