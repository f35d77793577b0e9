"""Checksums of raw bits, and the first element in which two ranks' bits differ.

Equality of copies is a matter of bits, not of values: the checksum reads storage, so -0.0 and 0.0
differ and equal NaNs agree. Each 64-bit word is mixed with its place by the finaliser of SplitMix64
(Steele, Lea, Flood 2014), with arithmetic shifts, and the results are summed modulo 2**64. The sum
has no order, so it is exact on any device, and the checksum of a whole is the sum of those of its
parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group

# The constants of SplitMix64 as signed integers, which is what torch computes with.
_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_WORD = 8
_CPU_RUN = 1 << 18  # words at a time: 4 MiB with scratch, which stays in cache
_DEVICE_RUN = 1 << 22
_PARTS = 256
_MAX_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first element in which ranks of a group differ.

    Attributes:
        index: its place in the flattened tensor.
        values: its value on each rank, in group order.
    """

    index: int
    values: tuple[str, ...]


def checksum(tensor: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Checksum of the bits of a tensor.

    Reads the tensor once, and needs at most 64 MiB of scratch memory, whatever the size.

    Args:
        tensor: any dtype and shape; copied if its bits do not fill whole, aligned words.
        place: number of 64-bit words before it in the whole that it is a part of.

    Returns:
        int64 scalar on the tensor's device; nothing waits for it.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    run = _CPU_RUN if words.device.type == "cpu" else _DEVICE_RUN
    for start in range(0, words.numel(), run):
        part = words[start : start + run]
        first = place + start
        mixed = torch.arange(first, first + part.numel(), device=words.device)
        mixed.add_(1).mul_(_PLACE).add_(part)
        mixed.bitwise_xor_(mixed >> 30).mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 27).mul_(_SECOND)
        mixed.bitwise_xor_(mixed >> 31)
        total += mixed.sum()
    return total


def first_difference(tensor: torch.Tensor, group: Group) -> Difference | None:
    """The first element in which the ranks' tensors differ; None if all bits are equal.

    For error paths: it narrows the place down by checksums of 256 parts, and looks at the last few
    elements.

    Args:
        tensor: of the same dtype and size on every rank.
        group: the ranks that compare.

    Collective: all-gathers of small objects over `group`, at most `log(bytes) / log(256) + 2`.
    """
    words = _words(tensor)
    low, high = 0, words.numel()
    while high - low > _PARTS:
        length = -(-(high - low) // _PARTS)
        starts = range(low, high, length)
        sums = [checksum(words[s : min(s + length, high)], s) for s in starts]
        part = _first_unequal(all_gather_objects(torch.stack(sums).tolist(), group))
        if part is None:
            return None
        low, high = starts[part], min(starts[part] + length, high)
    flat = tensor.reshape(-1)
    size = flat.element_size()
    first, last = low * _WORD // size, min(high * _WORD // size, flat.numel())
    few = flat[first:last].cpu()
    raw = few.contiguous().view(torch.uint8).view(-1, size).tolist()
    gathered = all_gather_objects([tuple(element) for element in raw], group)
    index = _first_unequal(gathered)
    if index is None:
        return None
    value = repr(few[index].item()) if index < few.numel() else "absent"
    return Difference(index=first + index, values=tuple(all_gather_objects(value, group)))


def by_rank(values: Sequence[object], ranks: Sequence[int]) -> str:
    """Which value is on which ranks, as text: `1.0 on ranks 0, 2; 2.0 on rank 1`."""
    holders: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        holders.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {_ranks(found)}" for value, found in holders.items())


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_NAMED])
    more = len(ranks) - _MAX_RANKS_NAMED
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''}"


def _first_unequal(lists: Sequence[Sequence[Hashable]]) -> int | None:
    """The first index at which the lists are not all equal; a list that ends differs there."""
    for index in range(max(len(entries) for entries in lists)):
        found = {entries[index] if index < len(entries) else None for entries in lists}
        if len(found) > 1:
            return index
    return None


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as 64-bit words, the last one filled up with zeros."""
    raw = tensor.detach().contiguous()
    # One element counts as contiguous whatever its strides say; they must not reach `view`.
    raw = raw.as_strided((raw.numel(),), (1,)).view(torch.uint8)
    rest = -raw.numel() % _WORD
    if rest or raw.storage_offset() % _WORD:
        padded = raw.new_zeros(raw.numel() + rest)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)
