"""Norm, zero count and non-finite check of the gradient: every logical element once, one reduction.

The sums of squares are taken in fp32 over runs of 64 Ki elements and added in fp64; the zero count
is int64 on each rank and travels as fp64, which is exact below 2**53. Only where the total is not
finite, or so small that squares may have underflowed, do all ranks measure again with care: in
fp64, and looking for the elements that are not finite. All ranks see the same total, so they agree
on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import all_gather_objects, all_reduce
from megatron_lw.distributed.group import Group
from megatron_lw.errors import NonFiniteError, PlanMismatchError

_RUN = 1 << 16
_SMALL_SUM_OF_SQUARES = 1e-24


@dataclass(frozen=True, slots=True)
class GradStats:
    """Statistics of the gradient of one step, equal on every rank.

    Attributes:
        norm: Euclidean norm over all logical elements; nan or inf if an element is not finite.
        zeros: number of elements that are exactly zero; None if not asked for.
        clipped_norm: the norm over the parameter groups that are clipped.
        nonfinite: parameters with elements that are not finite, and the ranks whose rows hold
        those.
        settings_agree: whether all ranks came with the same settings.
        failed: whether any rank came with a failure; nothing else is known then.
    """

    norm: float
    zeros: int | None
    clipped_norm: float = math.nan
    nonfinite: tuple[str, ...] = ()
    settings_agree: bool = True
    failed: bool = False

    @property
    def finite(self) -> bool:
        """Whether every gradient element is finite."""
        return not self.nonfinite


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A run of a bucket's row: counted, or a copy of what another rank counts.

    Attributes:
        bucket: the bucket.
        group: the parameter group.
        counts: whether it enters norm and zero count; of copies, only whether they are finite is
            asked: an element may overflow in one copy alone.
        start: first element in the row.
        stop: one past the last.
        padding: elements in it that are padding: always zero, so without effect on the norm, and
            taken off the zero count.
        slots: name, start and stop of each parameter in it.
    """

    bucket: BucketBuffer
    group: str
    counts: bool
    start: int
    stop: int
    padding: int
    slots: tuple[tuple[str, int, int], ...]

    @property
    def grads(self) -> torch.Tensor:
        """The gradients in it (a view of the row)."""
        return self.bucket.grad_row[self.start : self.stop]


def counted_runs(
    buckets: Sequence[BucketBuffer],
    counted: Callable[[str], int],
    group_of: Mapping[str, str],
) -> tuple[CountedRun, ...]:
    """The runs of this rank's rows, as few as possible, with whether they are counted.

    Args:
        buckets: all buckets of this rank.
        counted: how many leading local elements of the parameter of that name this rank counts; of
            several copies of one logical parameter exactly one rank may count any.
        group_of: parameter name -> parameter-group name.
    """
    runs: list[CountedRun] = []
    for bucket in buckets:
        slots: list[tuple[bool, str, int, int]] = []
        for name, slot in bucket.row_slots():
            end = slot.row_start + slot.numel
            middle = end - slot.numel + max(0, min(slot.numel, counted(name) - slot.param_start))
            slots.append((True, name, slot.row_start, middle))
            slots.append((False, name, middle, end))
        slots = [slot for slot in slots if slot[2] < slot[3]]
        for (counts, group), found in groupby(slots, key=lambda s: (s[0], group_of[s[1]])):
            parts = tuple((name, start, stop) for _, name, start, stop in found)
            start, stop = parts[0][1], parts[-1][2]
            padding = stop - start - sum(last - first for _, first, last in parts)
            runs.append(CountedRun(bucket, group, counts, start, stop, padding, parts))
    return tuple(runs)


def measure(
    runs: Sequence[CountedRun],
    group: Group,
    device: torch.device,
    *,
    count_zeros: bool,
    fingerprint: int = 0,
    exempt: Set[str] = frozenset(),
    kept: Kept | None = None,
) -> GradStats:
    """Norm and zero count of the reduced gradient over all ranks.

    Args:
        runs: what this rank counts.
        group: `groups.grad_stats`.
        device: where the reduction happens.
        count_zeros: whether zeros are asked for.
        fingerprint: a number below 2**16 that stands for this rank's settings; that it is the same
            on all ranks is found in the same reduction: only equal numbers have
            n sum(f^2) = (sum f)^2.
        exempt: parameter groups that are not clipped.
        kept: failures of this rank so far; that any rank has one is found in the same reduction.

    Collective: one all-reduce of six fp64 numbers over `group`; where the total is not finite or
    tiny, one more and, if an element is not finite, one all-gather of names.
    """
    kept = kept or Kept()
    total = torch.zeros(6, dtype=torch.float64, device=device)
    total[2], total[3] = fingerprint, fingerprint**2
    for run in runs:
        with kept.keeping(f"statistics of {run.bucket.label}"):
            grads = run.grads
            found = sum_of_squares(grads) * run.counts  # nan for a copy that is not finite
            total[0] += found
            total[5] += found * (run.group not in exempt)
            if count_zeros and run.counts:
                total[1] += grads.numel() - run.padding - torch.count_nonzero(grads)
    total[4] = kept.error is not None
    all_reduce(total, group, label="gradient statistics")
    squares, zeros, first, second, failures, clipped = total.tolist()
    nonfinite: tuple[str, ...] = ()
    if not failures and not (_SMALL_SUM_OF_SQUARES < squares < math.inf):
        squares, clipped, failures = _careful_sums_of_squares(runs, group, device, exempt, kept)
        if not failures and not math.isfinite(squares):
            nonfinite, failures = _name_nonfinite(runs, group, kept)
    if failures:
        return GradStats(norm=math.nan, zeros=None, failed=True)
    return GradStats(
        norm=math.sqrt(squares),
        zeros=int(zeros) if count_zeros else None,
        clipped_norm=math.sqrt(clipped),
        nonfinite=nonfinite,
        settings_agree=group.size * second == first * first,
    )


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied with so that their norm is at most `max_norm`; 1 if it is.

    `max_norm` 0 means no clipping. The 1e-6 in the denominator is that of
    `torch.nn.utils.clip_grad_norm_` and of Megatron.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def require_usable(measured: GradStats, *, skips: bool) -> None:
    """Refuse what no step can use; alike on every rank, as the statistics are the same.

    Args:
        measured: of this step.
        skips: whether a gradient that is not finite only skips the step.

    Raises:
        PlanMismatchError: ranks came with different settings.
        NonFiniteError: a gradient is not finite.
    """
    if not measured.settings_agree:
        raise PlanMismatchError(
            "ranks came to step() with different settings in param_groups (lr, weight_decay "
            "and the like); nothing was updated. Drive them by the same schedule on every rank"
        )
    if not measured.finite and not skips:
        raise NonFiniteError(
            f"the gradient is not finite in {', '.join(measured.nonfinite)}; nothing was "
            "updated. Look for the cause, or set on_nonfinite='skip' to skip such steps"
        )


def scale_gradients(
    buckets: Sequence[BucketBuffer],
    runs: Sequence[CountedRun],
    measured: GradStats,
    *,
    max_norm: float,
    by_total: bool,
    exempt: Set[str],
    inverse_scale: float,
) -> None:
    """Undo the loss scale everywhere, and clip what is not exempt, in place.

    Args:
        buckets: all buckets.
        runs: all runs of their rows.
        measured: norms, of gradients that are still scaled.
        max_norm: see `clip_coefficient`.
        by_total: whether the norm is that of all gradients, or of those that are clipped.
        exempt: parameter groups that are not clipped.
        inverse_scale: one over the loss scale.
    """
    norm = measured.norm if by_total else measured.clipped_norm
    clip = clip_coefficient(norm * inverse_scale, max_norm)
    if not exempt or clip == 1.0:
        if clip * inverse_scale != 1.0:
            for bucket in buckets:
                bucket.grad_row.mul_(clip * inverse_scale)
        return
    for run in runs:
        factor = inverse_scale if run.group in exempt else clip * inverse_scale
        if factor != 1.0:
            run.grads.mul_(factor)


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


def _careful_sums_of_squares(
    runs: Sequence[CountedRun], group: Group, device: torch.device, exempt: Set[str], kept: Kept
) -> tuple[float, float, float]:
    """Sums of squares in fp64, of all and of what is clipped, and how many ranks failed."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for run in runs:
        with kept.keeping(f"statistics of {run.bucket.label}"):
            norm = torch.linalg.vector_norm(run.grads, dtype=torch.float64)
            squares = norm.square_() * run.counts
            total[0] += squares
            total[1] += squares * (run.group not in exempt)
    total[2] = kept.error is not None
    all_reduce(total, group, label="gradient statistics in fp64")
    return float(total[0]), float(total[1]), float(total[2])


def _name_nonfinite(
    runs: Sequence[CountedRun], group: Group, kept: Kept
) -> tuple[tuple[str, ...], int]:
    """Parameters and ranks, and on how many ranks looking for them failed."""
    mine: dict[str, None] = {}
    for run in runs:
        with kept.keeping(f"statistics of {run.bucket.label}"):
            for name, start, stop in run.slots:
                if not torch.isfinite(run.bucket.grad_row[start:stop]).all():
                    mine[name] = None
    found = all_gather_objects((list(mine), kept.error is not None), group)
    named = tuple(
        f"{name} (in the row of rank {rank})"
        for rank, (names, _) in zip(group.ranks, found, strict=True)
        for name in names
    )
    return named, sum(failed for _, failed in found)
