"""Debugging aid: do all ranks of each group make the same collectives in the same order?

A rank that makes one call more or less than the others of its group pairs its data with theirs
wrongly from there on, or waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter

from megatron_lw.distributed.checksums import by_rank
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import InvariantError
from megatron_lw.groups import ParallelGroups

_REMEDY = "every rank of a group must make the same calls in the same order"
Calls = tuple[Sequence[int], Sequence[str], Mapping[str, int]]


def compare_call_counts(groups: ParallelGroups) -> None:
    """Check that the ranks of every group have made equal numbers of each collective so far.

    Collective: one all-gather of small objects over `groups.control`, which should have a process
    group of its own: a call that is out of step would pair with it.

    Raises:
        InvariantError: on every rank, naming the group, the collective, the ranks and the counts.
    """
    _compare(groups, {name: (g.ranks, (), dict(g.traffic.calls)) for name, g in _all(groups)})


@contextmanager
def same_calls(groups: ParallelGroups) -> Iterator[None]:
    """Check that in this block all ranks of every group make the same collectives in one order.

    Collective: when the block ends, as `compare_call_counts`; not if it ends by an exception, after
    which the ranks need not be in the same place.

    Raises:
        InvariantError: on every rank, naming the group, the ranks, the first call that differs and
            the counts.
    """
    before = {name: group.traffic.log for name, group in _all(groups)}
    for _, group in _all(groups):
        group.traffic.log = []
    try:
        yield
        made = {name: list(group.traffic.log or ()) for name, group in _all(groups)}
    finally:
        for name, group in _all(groups):
            outer = before[name]
            if outer is not None:
                outer.extend(group.traffic.log or ())
            group.traffic.log = outer
    _compare(groups, {n: (g.ranks, made[n], _count(made[n])) for n, g in _all(groups)})


def _all(groups: ParallelGroups) -> list[tuple[str, Group]]:
    """Every group with the field that names it."""
    return [(field.name, attrgetter(field.name)(groups)) for field in fields(groups)]


def _count(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in names}


def _compare(groups: ParallelGroups, mine: Mapping[str, Calls]) -> None:
    """Raise on every rank where any group's ranks differ; all ranks see all calls."""
    control = groups.control
    gathered = dict(zip(control.ranks, all_gather_objects(mine, control), strict=True))
    problems: list[str] = []
    for name in mine:
        for ranks in dict.fromkeys(tuple(calls[name][0]) for calls in gathered.values()):
            problems += _differences(name, ranks, [gathered[rank][name] for rank in ranks])
    if problems:
        raise InvariantError(f"collectives: {'; '.join(problems)}; {_REMEDY}")


def _differences(name: str, ranks: Sequence[int], calls: Sequence[Calls]) -> Iterator[str]:
    """What the ranks of one group do not have in common: counts, or else the order."""
    counts = [count for _, _, count in calls]
    kinds = dict.fromkeys(kind for count in counts for kind in count)
    wrong = [kind for kind in kinds if len({count.get(kind, 0) for count in counts}) > 1]
    for kind in wrong:
        shown = by_rank([f"{count.get(kind, 0)} calls" for count in counts], ranks)
        yield f"{kind} over group {name!r}: {shown}"
    orders = [order for _, order, _ in calls]
    for index in range(max(len(order) for order in orders)):
        found = [order[index] if index < len(order) else "none" for order in orders]
        if len(set(found)) > 1:
            yield f"call {index} over group {name!r} is {by_rank(found, ranks)}"
            return
