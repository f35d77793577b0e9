"""Norm, zero count and non-finite check of the gradient: every logical element once, one reduction.

The sums of squares are taken in fp32 over runs of 64 Ki elements and added in fp64; the zero count
is int64 on each rank and travels as fp64, which is exact below 2**53. Only where the total is not
finite, or so small that squares may have underflowed, do all ranks measure again with care: in
fp64, and looking for the elements that are not finite. All ranks see the same total, so they agree
on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import all_gather_objects, all_reduce
from megatron_lw.distributed.group import Group

_RUN = 1 << 16
_SMALL_SUM_OF_SQUARES = 1e-24


@dataclass(frozen=True, slots=True)
class GradStats:
    """Statistics of the gradient of one step, equal on every rank.

    Attributes:
        norm: Euclidean norm over all logical elements; nan or inf if an element is not finite.
        zeros: number of elements that are exactly zero; None if not asked for.
        nonfinite: "name (rank r)" for parameters with elements that are not finite.
    """

    norm: float
    zeros: int | None
    nonfinite: tuple[str, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether every gradient element is finite."""
        return not self.nonfinite


@dataclass(frozen=True, slots=True)
class CountedRange:
    """A run of a bucket's row that this rank counts: no padding, no second copy.

    Attributes:
        bucket: the bucket.
        start: first element in the row.
        stop: one past the last.
        name: the parameter's global name.
    """

    bucket: BucketBuffer
    start: int
    stop: int
    name: str

    @property
    def grads(self) -> torch.Tensor:
        """The gradients in it (a view of the row)."""
        return self.bucket.grad_row[self.start : self.stop]


def counted_ranges(
    buckets: Sequence[BucketBuffer], counted: Callable[[str], bool]
) -> tuple[CountedRange, ...]:
    """The ranges of this rank's rows that enter the statistics.

    Args:
        buckets: all buckets of this rank.
        counted: whether this rank counts its part of the parameter of that name; of several copies
            of one logical parameter exactly one rank may count.
    """
    ranges: list[CountedRange] = []
    for bucket in buckets:
        for name, slot in bucket.row_slots():
            if counted(name):
                stop = slot.row_start + slot.numel
                ranges.append(CountedRange(bucket, slot.row_start, stop, name))
    return tuple(ranges)


def measure(
    ranges: Sequence[CountedRange], group: Group, device: torch.device, *, count_zeros: bool
) -> GradStats:
    """Norm and zero count of the reduced gradient over all ranks.

    Args:
        ranges: what this rank counts.
        group: `groups.grad_stats`.
        device: where the reduction happens.
        count_zeros: whether zeros are asked for.

    Collective: one all-reduce of two fp64 numbers over `group`; where the total is not finite or
    tiny, one more and, if an element is not finite, one all-gather of names.
    """
    squares, zeros = _total(ranges, group, device, count_zeros=count_zeros, careful=False)
    nonfinite: tuple[str, ...] = ()
    if not (_SMALL_SUM_OF_SQUARES < squares < math.inf):
        squares, _ = _total(ranges, group, device, count_zeros=False, careful=True)
        if not math.isfinite(squares):
            nonfinite = _name_nonfinite(ranges, group)
    return GradStats(math.sqrt(squares), zeros if count_zeros else None, nonfinite)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied with so that their norm is at most `max_norm`; 1 if it is.

    `max_norm` 0 means no clipping. The 1e-6 in the denominator is that of
    `torch.nn.utils.clip_grad_norm_` and of Megatron.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat tensor: fp32 inside runs of 64 Ki elements, fp64 across them.

    Args:
        x: [numel], any float dtype.

    Returns:
        fp64 scalar tensor.
    """
    whole = x.numel() // _RUN * _RUN
    norms = torch.linalg.vector_norm(x[:whole].view(-1, _RUN), dim=1, dtype=torch.float32)
    tail = torch.linalg.vector_norm(x[whole:], dtype=torch.float32)
    total: torch.Tensor = norms.double().square_().sum() + tail.double().square_()
    return total


def _total(
    ranges: Sequence[CountedRange],
    group: Group,
    device: torch.device,
    *,
    count_zeros: bool,
    careful: bool,
) -> tuple[float, int]:
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for part in ranges:
        grads = part.grads
        if careful:
            total[0] += torch.linalg.vector_norm(grads, dtype=torch.float64).square_()
        else:
            total[0] += sum_of_squares(grads)
        if count_zeros:
            total[1] += grads.numel() - torch.count_nonzero(grads)
    all_reduce(total, group)
    squares, zeros = total.tolist()
    return squares, int(zeros)


def _name_nonfinite(ranges: Sequence[CountedRange], group: Group) -> tuple[str, ...]:
    mine = [part.name for part in ranges if not torch.isfinite(part.grads).all()]
    found = all_gather_objects(list(dict.fromkeys(mine)), group)
    return tuple(
        f"{name} (rank {rank})"
        for rank, names in zip(group.ranks, found, strict=True)
        for name in names
    )
