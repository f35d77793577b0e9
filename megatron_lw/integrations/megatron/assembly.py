"""Whole local tensors from what lies in the rows of several ranks, and rows from whole ones.

Megatron's checkpoints know boxes of a regular grid: a parameter's state is one tensor of the shape
that the parameter has on this rank. Most lie wholly in one row and are taken as they lie. A cut one
is put together by the rank that holds most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_lw.distributed import collectives
from megatron_lw.optimizer.held import Held
from megatron_lw.optimizer.layout import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where one parameter of a bucket lies.

    Attributes:
        name: global name.
        numel: its elements on this rank.
        slots: rank of the reduce group -> its slot; several if the parameter is cut.
    """

    name: str
    numel: int
    slots: Mapping[int, Slot]

    @property
    def writer(self) -> int:
        """The rank that holds most of it, the first of these."""
        return min(self.slots, key=lambda rank: (-self.slots[rank].numel, rank), default=0)

    @property
    def is_cut(self) -> bool:
        """Whether several ranks hold a part."""
        return len(self.slots) > 1


def spreads(held: Held) -> list[Spread]:
    """Where the parameters of a bucket lie, in the order in which they lie."""
    layout = held.bucket.layout
    found: dict[int, dict[int, Slot]] = {param: {} for param in layout.params}
    for row, slots in enumerate(layout.slots):
        for slot in slots:
            found[slot.param][row] = slot
    return [
        Spread(name=name, numel=numel, slots=found[param])
        for name, param, numel in zip(held.bucket.names, layout.params, layout.numels, strict=True)
    ]


def assemble(held: Held) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, state key and flat local tensor of all that this rank writes of a bucket.

    Tensors may be views of rows. The key of the master is "master".

    Collective: one all-to-all over the bucket's reduce group for each state, if the bucket has a
    cut parameter.
    """
    places = spreads(held)
    rank = held.bucket.group.rank
    for key, row in held.rows.items():
        whole = _exchange(held, places, row) if any(p.is_cut for p in places) else {}
        for place in places:
            if place.writer != rank:
                continue
            if place.name in whole:
                yield place.name, key, whole[place.name]
            else:
                yield place.name, key, _own(place, row, rank)


def fill(row: torch.Tensor, slot: Slot, whole: torch.Tensor) -> None:
    """Copy the part of a whole local tensor that lies in a slot.

    Args:
        row: this rank's, of the master or of a state.
        slot: of the parameter in the row.
        whole: of the parameter's local shape.
    """
    part = whole.reshape(-1)[slot.param_start : slot.param_start + slot.numel]
    row[slot.row_start : slot.row_start + slot.numel].copy_(part)


def _own(place: Spread, row: torch.Tensor, rank: int) -> torch.Tensor:
    slot = place.slots.get(rank)
    return row[:0] if slot is None else row[slot.row_start : slot.row_start + slot.numel]


def _exchange(held: Held, places: list[Spread], row: torch.Tensor) -> dict[str, torch.Tensor]:
    """The cut parameters that this rank writes, put together."""
    group = held.bucket.group
    cut = [place for place in places if place.is_cut]
    to = [[p for p in cut if p.writer == r != group.rank] for r in range(group.size)]
    mine = [place for place in cut if place.writer == group.rank]
    sent = [[_own(place, row, group.rank) for place in to_rank] for to_rank in to]
    splits = [sum(part.numel() for part in parts) for parts in sent]
    came = [
        [(p, p.slots[r]) for p in mine if r in p.slots] if r != group.rank else []
        for r in range(group.size)
    ]
    lengths = [sum(slot.numel for _, slot in parts) for parts in came]
    outgoing = torch.cat([row[:0], *(part for parts in sent for part in parts)])
    incoming = row.new_empty(sum(lengths))
    label = f"state for a checkpoint, {held.bucket.label}"
    collectives.all_to_all(incoming, outgoing, lengths, splits, group, label=label)
    whole = {place.name: row.new_empty(place.numel) for place in mine}
    for place in mine:
        _put(whole[place.name], place.slots[group.rank], _own(place, row, group.rank))
    start = 0
    for place, slot in (each for parts in came for each in parts):
        _put(whole[place.name], slot, incoming[start : start + slot.numel])
        start += slot.numel
    return whole


def _put(whole: torch.Tensor, slot: Slot, part: torch.Tensor) -> None:
    whole[slot.param_start : slot.param_start + slot.numel].copy_(part)
