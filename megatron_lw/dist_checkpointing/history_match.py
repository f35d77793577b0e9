"""Loading histories of maxima: what was saved of each, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_lw.dist_checkpointing.entries import Entry
from megatron_lw.dist_checkpointing.manifest import HISTORY, Manifest, TensorRecord
from megatron_lw.dist_checkpointing.match import Key, SavedNames
from megatron_lw.dist_checkpointing.reading import Read, find_reads
from megatron_lw.dist_checkpointing.snapshot import is_named
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restore:
    """A history of this rank, and what it is to become.

    Attributes:
        entry: the history.
        saved: fp32 `[parts, length]`, as saved; filled by reading. None: none was saved.
    """

    entry: Entry
    saved: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Histories:
    """How this rank's histories are to be loaded.

    Attributes:
        restores: each history that does not stay as it is.
        reads: what fills `Restore.saved`.
        used: saved histories that this rank reads, by name and state.
        fresh: keys of those that were not saved, and start anew.
        adapted: keys of those that were saved with another length or number of parts.
        left_out: keys of those that stay as they are, as `leave_out` says.
    """

    restores: tuple[Restore, ...]
    reads: tuple[Read, ...]
    used: frozenset[Key]
    fresh: tuple[str, ...]
    adapted: tuple[str, ...]
    left_out: tuple[str, ...]


def match_histories(
    entries: Sequence[Entry],
    manifest: Manifest,
    aliases: Mapping[str, tuple[str, ...]],
    *,
    leave_out: Collection[str],
) -> Histories:
    """Find for every history of this rank what was saved of it. Nothing is read or changed.

    Args:
        entries: from `history_entries`.
        manifest: the checkpoint.
        aliases: from `gather_aliases`.
        leave_out: patterns of names, or of `name/state`, that stay as they are.

    Raises:
        CheckpointError: what was saved is no history.
    """
    saved = SavedNames(manifest)
    restores: list[Restore] = []
    reads: list[Read] = []
    used: set[Key] = set()
    fresh: list[str] = []
    adapted: list[str] = []
    left_out: list[str] = []
    for entry in entries:
        if is_named(leave_out, entry.name, entry.state):
            left_out.append(entry.key)
            continue
        name = saved.identity(aliases.get(entry.name, (entry.name,)))
        record = None if name is None else saved.records.get((name, HISTORY))
        if record is None:
            fresh.append(entry.key)
            restores.append(Restore(entry=entry, saved=None))
            continue
        _require_history(record)
        used.add((record.name, record.state))
        if record.shape != entry.shape:
            adapted.append(entry.key)
        target = torch.empty(record.shape, dtype=torch.float32)
        reads += find_reads(record, record.shape, Box((0, 0), record.shape), target)
        restores.append(Restore(entry=entry, saved=target))
    return Histories(
        restores=tuple(restores),
        reads=tuple(reads),
        used=frozenset(used),
        fresh=tuple(fresh),
        adapted=tuple(adapted),
        left_out=tuple(left_out),
    )


def restore(restores: Sequence[Restore]) -> None:
    """Set the histories from what was read.

    The newest maxima are kept, as many as there is room for; where fewer were saved, the rest is
    as of a run that is no older. With another number of parts each part gets the largest maxima
    of all parts: its scale may then be smaller than it was, and nothing saturates that did not.
    """
    for each in restores:
        past = each.entry.tensor
        past.zero_()
        if each.saved is None:
            continue
        part, parts = each.entry.box.start[0], each.entry.shape[0]
        same = each.saved.shape[0] == parts
        rows = each.saved[part : part + 1] if same else each.saved.amax(0, keepdim=True)
        length = min(past.shape[1], rows.shape[1])
        past[:, :length].copy_(rows[:, :length])


def _require_history(record: TensorRecord) -> None:
    """Raise CheckpointError unless a saved tensor can be a history."""
    if record.dtype != "float32" or len(record.shape) != 2 or 0 in record.shape:
        raise CheckpointError(
            f"{record.key} is {record.dtype} of shape {list(record.shape)}; a history of maxima "
            "is float32 [parts, length]: name it in leave_out= to start anew"
        )
