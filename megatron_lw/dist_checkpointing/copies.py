"""Copies of one tensor on several ranks: found equal, and each written once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megatron_lw.dist_checkpointing.entries import Entry
from megatron_lw.distributed.agreement import agree_or_raise, attempt
from megatron_lw.distributed.checksums import by_rank, checksum
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CheckpointError
from megatron_lw.groups import DOMAINS, ParallelGroups
from megatron_lw.optimizer.agree import digest_facts

Facts = Mapping[str, tuple[object, ...]]
_REMEDY = (
    "copies must be equal before they are saved; optimizer.check() tells since when a weight "
    "differs, and leave_out= leaves a buffer out that is meant to differ"
)


def check_copies(entries: Sequence[Entry], groups: ParallelGroups) -> None:
    """Compare the copies of masters and states that several ranks hold.

    Collective: an all-gather of digests over each group with copies, one of facts where digests
    differ, and one of verdicts over `groups.control`.

    Raises:
        CheckpointError: on every rank, naming the first tensor whose copies differ, with the ranks.
    """
    found = {id(g): g for domain in DOMAINS for g in (groups.domain(domain).tensor,)}
    found[id(groups.embedding)] = groups.embedding
    over = [group for group in found.values() if group.size > 1]

    def collect() -> list[Facts]:
        return [_facts([e for e in entries if any(g is c for c in e.copies)]) for g in over]

    problems: list[str] = []
    for group, facts in zip(over, attempt(collect, groups.control), strict=True):
        digests = all_gather_objects(digest_facts(list(facts.items())), group)
        if len(set(digests)) > 1:
            problems += _differences(all_gather_objects(facts, group), group, partial=False)
    problem = CheckpointError(f"{problems[0]}; {_REMEDY}") if problems else None
    agree_or_raise(problem, groups.control)


def assign_writers(entries: Sequence[Entry], group: Group) -> tuple[Entry, ...]:
    """Compare entries that any ranks may hold copies of, and give each of them one writer.

    Collective: an all-gather of names and checksums over `group`.

    Returns:
        The entries, with `writes` set on the one rank that is to write.

    Raises:
        CheckpointError: on every rank, naming the first tensor whose copies differ, with the ranks.
    """
    gathered = all_gather_objects(attempt(lambda: _facts(entries), group), group)
    problems = _differences(gathered, group, partial=True)
    if problems:
        raise CheckpointError(f"{problems[0]}; {_REMEDY}")
    firsts = {_label(entry): entry for entry in reversed(entries)}
    return tuple(
        replace(entry, writes=_writer(entry, gathered) == group.rank)
        if firsts[_label(entry)] is entry
        else entry
        for entry in entries
    )


def _writer(entry: Entry, gathered: Sequence[Facts]) -> int:
    """Which rank of the group writes; names spread the work over those that hold a copy."""
    text = _label(entry)
    return writer_among([rank for rank, facts in enumerate(gathered) if text in facts], text)


def writer_among(holders: Sequence[int], text: str) -> int:
    """Which of the ranks that hold a copy writes it.

    Args:
        holders: ranks, ascending.
        text: what `label` calls it.
    """
    return holders[zlib.crc32(text.encode()) % len(holders)]


def _facts(entries: Sequence[Entry]) -> dict[str, tuple[object, ...]]:
    """What must be equal: dtype, logical shape and bits; the host waits for each device once.

    Raises:
        CheckpointError: this rank holds a tensor twice, with different contents.
    """
    found: dict[str, tuple[object, ...]] = {}
    for device in dict.fromkeys(entry.tensor.device for entry in entries):
        here = [entry for entry in entries if entry.tensor.device == device]
        sums = torch.stack([checksum(entry.tensor) for entry in here]).tolist()
        for entry, value in zip(here, sums, strict=True):
            fact = (entry.dtype, entry.shape, f"checksum {value % (1 << 64):016x}")
            if found.setdefault(_label(entry), fact) != fact:
                raise CheckpointError(
                    f"{entry.key} is in two chunks of one rank, with different contents; "
                    f"{_REMEDY}; a NameMap tells chunks apart"
                )
    return found


def _label(entry: Entry) -> str:
    return label(entry.key, entry.box.start)


def label(key: str, start: tuple[int, ...]) -> str:
    """What a part of a tensor is called, the same on all ranks that hold it."""
    return f"{key} at {list(start)}"


def _differences(gathered: Sequence[Facts], group: Group, *, partial: bool) -> list[str]:
    """Texts about tensors whose facts are not equal on all ranks that should hold them."""
    return list(_find_differences(gathered, group, partial))


def _find_differences(gathered: Sequence[Facts], group: Group, partial: bool) -> Iterator[str]:
    for label in dict.fromkeys(label for facts in gathered for label in facts):
        holders = [
            (rank, facts.get(label))
            for rank, facts in zip(group.ranks, gathered, strict=True)
            if label in facts or not partial
        ]
        if len({fact for _, fact in holders}) > 1:
            values = [_shown(fact) for _, fact in holders]
            yield f"{label} differs over group {group.name!r}: " + by_rank(
                values, [rank for rank, _ in holders]
            )


def _shown(fact: tuple[object, ...] | None) -> str:
    return "absent" if fact is None else " ".join(str(value) for value in fact)
