"""Everything that was saved is read by some rank, dropped for a reason, or left out by name."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_lw.dist_checkpointing.history_match import Histories
from megatron_lw.dist_checkpointing.manifest import HISTORY, Manifest
from megatron_lw.dist_checkpointing.match import Key, Match, require_all_used
from megatron_lw.dist_checkpointing.snapshot import is_named, settings_of
from megatron_lw.dist_checkpointing.source import Source
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import all_gather_objects, gather_objects
from megatron_lw.distributed.group import Group

LOSS_SCALER = "loss_scaler"
_OF_SCHEDULERS = frozenset(("initial_lr",))
"""What torch's schedulers add to groups for themselves."""


class CheckpointWarning(UserWarning):
    """Something that was saved is not loaded, or the reverse, and that is allowed."""


def account(
    source: Source,
    found: Match,
    histories: Histories,
    group: Group,
    groups: Sequence[Mapping[str, Any]],
    *,
    leave_out: Collection[str],
    weights_only: bool,
    keep_settings: bool | Collection[str],
) -> tuple[str, ...]:
    """Find what no rank asks for; warn, on the first rank, of what is dropped, new or ignored.

    Args:
        source: the checkpoint.
        found: what this rank reads.
        histories: the same of histories of maxima.
        group: all ranks.
        groups: the parameter groups, as they are now.
        leave_out: as `load`.
        weights_only: as `load`.
        keep_settings: as `load`.

    Returns:
        Keys of what was saved and is left out.

    Collective: a gather over `group`, then an all-gather of the verdict.

    Raises:
        CheckpointError: on every rank: something was saved that the model does not have.
    """
    here = (
        found.used | histories.used,
        found.dropped,
        (*found.left_out, *histories.left_out),
        (histories.fresh, histories.adapted),
    )
    gathered = gather_objects(here, group)

    def settle() -> tuple[str, ...]:
        if gathered is None:
            return ()
        manifest = source.manifest
        left_out = require_all_used(
            manifest,
            [(used, dropped) for used, dropped, *_ in gathered],
            leave_out=leave_out,
            weights_only=weights_only,
        )
        dropped = sorted("/".join(key) for _, keys, *_ in gathered for key in keys)
        told = list(_of_extra(source, group.size))
        told += _of_histories(
            [each for *_, each in gathered],
            _unfollowed(manifest, {key for used, *_ in gathered for key in used}, left_out),
        )
        if not weights_only:
            keys = {*left_out, *(key for _, _, kept, _ in gathered for key in kept)}
            told += _of_states(dropped)
            told += _of_groups(manifest, groups)
            told += _of_patterns(leave_out, keys)
            if keep_settings is not True:
                told += _of_settings(source, groups)
        for message in told:
            warnings.warn(message, CheckpointWarning, stacklevel=2)
        return left_out

    verdict: tuple[str, ...] = all_gather_objects(attempt(settle, group), group)[0]
    return verdict


def _of_states(dropped: Sequence[str]) -> Iterator[str]:
    if dropped:
        yield (
            "states that another child kept are dropped, and start from zero: "
            f"{', '.join(dict.fromkeys(dropped))}"
        )


def _unfollowed(manifest: Manifest, used: Collection[Key], left_out: Collection[str]) -> list[str]:
    """Keys of saved histories that no weight of the model follows."""
    return [
        record.key
        for record in manifest.tensors
        if record.state == HISTORY
        and (record.name, record.state) not in used
        and record.key not in left_out
    ]


def _of_histories(
    by_rank: Sequence[tuple[Sequence[str], Sequence[str]]], unfollowed: Sequence[str]
) -> Iterator[str]:
    fresh = sorted({key for keys, _ in by_rank for key in keys})
    adapted = sorted({key for _, keys in by_rank for key in keys})
    if fresh:
        yield f"histories of maxima that were not saved start anew: {', '.join(fresh)}"
    if unfollowed:
        yield f"histories of maxima that no weight follows are dropped: {', '.join(unfollowed)}"
    if adapted:
        yield (
            "histories of maxima that were saved with another length or number of parts are "
            f"adapted, so that scales may differ: {', '.join(adapted)}"
        )


def _of_groups(manifest: Manifest, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    present = [group["name"] for group in groups]
    new = [name for name in present if name not in manifest.groups]
    gone = [name for name in manifest.groups if name not in present]
    if new:
        yield f"parameter groups that were not saved keep their settings: {', '.join(new)}"
    if gone:
        yield f"saved parameter groups that are no more are dropped: {', '.join(gone)}"


def _of_settings(source: Source, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for group in groups:
        if group["name"] not in source.manifest.groups:
            continue
        saved = source.settings(group["name"])
        present = settings_of(group)
        kept = sorted(present.keys() - saved.keys() - _OF_SCHEDULERS)
        new = sorted(saved.keys() - present.keys() - _OF_SCHEDULERS)
        where = f"parameter group {group['name']!r}:"
        if kept:
            yield f"{where} settings that were not saved stay as they are: {', '.join(kept)}"
        if new:
            yield f"{where} saved settings that it did not have are added: {', '.join(new)}"


def _of_patterns(leave_out: Collection[str], keys: Collection[str]) -> Iterator[str]:
    parts = [key.rpartition("/") for key in keys]
    idle = [
        pattern
        for pattern in leave_out
        if pattern != LOSS_SCALER
        and not any(is_named([pattern], name, state) for name, _, state in parts)
    ]
    if idle:
        yield f"leave_out has patterns that name nothing: {', '.join(map(repr, idle))}"


def _of_extra(source: Source, num_ranks: int) -> Iterator[str]:
    num_saved, by_rank = source.num_ranks, source.manifest.values_by_rank
    if by_rank and num_saved != num_ranks:
        names = sorted({key for values in by_rank for key in values})
        yield (
            f"{num_saved} ranks saved values of their own in extra ({', '.join(names)}), and "
            f"{num_ranks} ranks load: take what is needed from extra_of_rank"
        )
