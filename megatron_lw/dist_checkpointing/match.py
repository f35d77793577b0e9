"""What a load asks for against what a checkpoint holds: every key on either side is accounted for.

Nothing is read here, and nothing changed. A key that is missing, unknown or of another dtype or
shape is an error that names it; what is deliberately left out or dropped is listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lw.dist_checkpointing.entries import Entry, Holdings
from megatron_lw.dist_checkpointing.frozen import PLANES
from megatron_lw.dist_checkpointing.manifest import (
    HISTORY,
    MASTER,
    VALUE,
    Manifest,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.reading import Read, find_reads
from megatron_lw.dist_checkpointing.snapshot import EXTRA, is_named
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.names import natural_key

_SHOWN = 5
_REMEDY = "load into the model that was saved, or name in leave_out= what is to be left out"

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How one rank's load is to go.

    Attributes:
        reads: what is read into masters, states, frozen parameters and buffers.
        identities: global name on this rank -> name in the checkpoint, of stepped parameters.
        fresh: states that start from zero, as another child stepped the parameter before.
        restarted: global names on this rank of the parameters whose states these are.
        used: saved tensors that this rank reads, by name and state.
        dropped: saved states that no one asks for, for the same reason.
        left_out: what stays as it is on this rank, as `leave_out` says.
        owned: what was saved of children besides tensors, decoded by `load`: kind of the child ->
            parameter of this rank -> key -> value.
    """

    reads: tuple[Read, ...]
    identities: Mapping[str, str]
    fresh: tuple[Entry, ...]
    restarted: frozenset[str]
    used: frozenset[Key]
    dropped: frozenset[Key]
    left_out: tuple[str, ...]
    owned: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)


class SavedNames:
    """Finds what was saved of a parameter under any of its names."""

    def __init__(self, manifest: Manifest) -> None:
        self.records: Mapping[Key, TensorRecord] = {
            (record.name, record.state): record for record in manifest.tensors
        }
        self.children = {param.name: param.child for param in manifest.params}
        self._identity = {
            name: param.name for param in manifest.params for name in (*param.names, param.name)
        }

    def identity(self, names: Iterable[str]) -> str | None:
        """The saved identity of a stepped parameter that has one of these names."""
        return next((self._identity[name] for name in names if name in self._identity), None)

    def states_of(self, name: str) -> list[Key]:
        """Keys of all states that a child keeps of a parameter."""
        others = (MASTER, VALUE, HISTORY)
        return [key for key in self.records if key[0] == name and key[1] not in others]


def gather_aliases(held: Holdings, group: Group) -> dict[str, tuple[str, ...]]:
    """Identity of a tied weight -> all names that it may have been saved by, alike on every rank.

    Collective: all-gather of names over `group`.
    """
    found: dict[str, set[str]] = {}
    for tied in all_gather_objects(dict(held.tied), group):
        for name, of_rank in tied.items():
            found.setdefault(name, set()).add(of_rank)
    return {name: (name, *sorted(names, key=natural_key)) for name, names in found.items()}


def match(
    held: Holdings,
    manifest: Manifest,
    aliases: Mapping[str, tuple[str, ...]],
    *,
    leave_out: Collection[str],
    weights_only: bool,
) -> Match:
    """Find for everything that this rank holds what was saved of it.

    Args:
        held: what the rank holds.
        manifest: the checkpoint.
        aliases: from `gather_aliases`.
        leave_out: patterns of names, or of `name/state`, that stay as they are.
        weights_only: whether states stay as they are.

    Raises:
        CheckpointError: something was not saved, or with another dtype or logical shape.
    """
    saved = SavedNames(manifest)
    child_of = {param.name: param.child for param in held.params}
    reads: list[Read] = []
    fresh: list[Entry] = []
    used: set[Key] = set()
    dropped: set[Key] = set()
    left_out: list[str] = []
    missing: list[str] = []
    for entry in (*held.entries, *held.values):
        is_state = entry.state not in (MASTER, VALUE)
        if is_state and weights_only:
            continue
        if is_named(leave_out, entry.name, entry.state):
            left_out.append(entry.key)
            continue
        if entry.name.startswith(PLANES) and (entry.name, entry.state) not in saved.records:
            continue  # of another recipe: its values are quantised
        identity = saved.identity(aliases.get(entry.name, (entry.name,)))
        if is_state and identity is not None:
            if saved.children[identity] != child_of[entry.name]:
                fresh.append(entry)
                dropped.update(saved.states_of(identity))
                continue
        record = _record_of(entry, identity, saved)
        if record is None:
            missing.append(entry.key)
            continue
        _require_writable(entry)
        used.add((record.name, record.state))
        reads += find_reads(record, entry.shape, entry.box, entry.tensor)
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {_listed(missing)}, which the model has; {_REMEDY}"
        )
    found = {p: saved.identity(aliases.get(p.name, (p.name,))) for p in held.params}
    return Match(
        reads=tuple(reads),
        identities={name: known for param, known in found.items() if known for name in param.names},
        fresh=tuple(fresh),
        restarted=frozenset(
            name
            for param, known in found.items()
            if known and saved.children[known] != param.child
            for name in param.names
        ),
        used=frozenset(used),
        dropped=frozenset(dropped),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def require_all_used(
    manifest: Manifest,
    matches: Sequence[tuple[frozenset[Key], frozenset[Key]]],
    *,
    leave_out: Collection[str],
    weights_only: bool,
) -> tuple[str, ...]:
    """Check that everything that was saved is read by a rank, dropped for a reason or left out.

    Args:
        manifest: the checkpoint.
        matches: for each rank what it uses and what it drops.
        leave_out: as `match`.
        weights_only: as `match`.

    Returns:
        Keys of what was saved and is left out.

    Raises:
        CheckpointError: something was saved that the model does not have.
    """
    known = frozenset().union(*(keys for pair in matches for keys in pair))
    unknown: list[str] = []
    left_out: list[str] = []
    for record in manifest.tensors:
        if (record.name, record.state) in known or record.name.startswith((EXTRA, PLANES)):
            continue
        if weights_only and record.state not in (MASTER, VALUE, HISTORY):
            continue
        if is_named(leave_out, record.name, record.state):
            left_out.append(record.key)
        elif record.state != HISTORY:  # what no weight follows is dropped, see `account`
            unknown.append(record.key)
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {_listed(unknown)}, which the model has not; {_REMEDY}"
        )
    return tuple(left_out)


def _record_of(entry: Entry, identity: str | None, saved: SavedNames) -> TensorRecord | None:
    """The saved tensor for an entry; a weight may have been frozen then and not now, or reverse.

    Raises:
        CheckpointError: its dtype differs.
    """
    name = entry.name if identity is None else identity
    record = saved.records.get((name, entry.state))
    if record is not None:
        if record.dtype != entry.dtype:
            raise CheckpointError(
                f"{entry.key} is {entry.dtype} in the model and {record.dtype} in the checkpoint; "
                "load into a model of the saved dtype"
            )
        return record
    other = {MASTER: VALUE, VALUE: MASTER}.get(entry.state)
    return None if other is None else saved.records.get((name, other))


def _require_writable(entry: Entry) -> None:
    """Raise CheckpointError for an expanded tensor, whose elements share memory."""
    tensor = entry.tensor
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise CheckpointError(
            f"{entry.key} is an expanded tensor, which cannot be loaded into; clone() it"
        )


def _listed(keys: Sequence[str]) -> str:
    keys = list(dict.fromkeys(keys))
    shown = ", ".join(repr(key) for key in keys[:_SHOWN])
    rest = len(keys) - _SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
