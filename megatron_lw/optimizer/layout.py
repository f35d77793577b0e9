"""Where everything lies in a bucket: offsets, rows, slots, declared padding.

Logical elements and storage are told apart here and nowhere else: slots name logical elements,
padding is declared, and together they tile every row exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.packing import lay_line
from megatron_lw.optimizer.plan import OwnershipPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place, or part of it, in a row.

    Attributes:
        param: Index into `OwnershipPlan.params`.
        row: The row.
        row_start: Offset in the row.
        param_start: Offset in the flattened local parameter.
        numel: Elements.
    """

    param: int
    row: int
    row_start: int
    param_start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The layout of one bucket, verified on construction.

    Attributes:
        row_lengths: Elements of each row.
        params: Indices into `OwnershipPlan.params`, in the order in which they lie.
        numels: Local elements of each of `params`.
        offsets: Start of each of `params` in the bucket.
        slots: For each row its slots, in the order in which they lie.
        padding: Declared padding as (start, stop) offsets in the bucket, ascending.
    """

    row_lengths: tuple[int, ...]
    params: tuple[int, ...]
    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    slots: tuple[tuple[Slot, ...], ...]
    padding: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Verify that slots and padding tile the rows, and slots the parameters.

        Raises:
            ConfigError: If they do not; names the offset or the parameter.
        """
        _verify_rows(self)
        _verify_params(self)

    @classmethod
    def build(cls, plan: OwnershipPlan, bucket_index: int) -> BucketLayout:
        """Lay out bucket `bucket_index` of `plan`.

        Raises:
            ConfigError: If the plan has no such bucket.
        """
        if not 0 <= bucket_index < len(plan.buckets):
            raise ConfigError(
                f"bucket_index={bucket_index}: the plan of domain {plan.domain!r} has buckets 0 to "
                f"{len(plan.buckets) - 1}"
            )
        bucket = plan.buckets[bucket_index]
        numels = tuple(plan.params[index].numel for index in bucket.params)
        line = lay_line(numels, plan.alignment)
        rows = (bucket.row_length,) * plan.dp
        spans = [
            (start, start + numel)
            for start, numel in zip(line.offsets, numels, strict=True)
            if numel
        ]
        edges = [0, *(edge for span in spans for edge in span), sum(rows)]
        return cls(
            row_lengths=rows,
            params=bucket.params,
            numels=numels,
            offsets=line.offsets,
            slots=_cut_into_slots(bucket.params, numels, line.offsets, rows),
            padding=tuple(
                gap for gap in zip(edges[::2], edges[1::2], strict=True) if gap[0] < gap[1]
            ),
        )

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return sum(self.row_lengths)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """Offset of each row in the bucket."""
        return tuple(accumulate(self.row_lengths, initial=0))[:-1]

    def padding_in_row(self, row: int) -> tuple[tuple[int, int], ...]:
        """Return the declared padding of a row as (start, stop) offsets in that row."""
        low = self.row_starts[row]
        high = low + self.row_lengths[row]
        clipped = ((max(start, low), min(stop, high)) for start, stop in self.padding)
        return tuple((start - low, stop - low) for start, stop in clipped if start < stop)


def _cut_into_slots(
    params: Iterable[int],
    numels: Iterable[int],
    offsets: Iterable[int],
    row_lengths: tuple[int, ...],
) -> tuple[tuple[Slot, ...], ...]:
    """Cut parameters, given in the order in which they lie, at the row ends."""
    edges = tuple(accumulate(row_lengths, initial=0))
    slots: list[list[Slot]] = [[] for _ in row_lengths]
    row = 0
    for param, numel, offset in zip(params, numels, offsets, strict=True):
        done = 0
        while done < numel:
            while edges[row + 1] <= offset + done:
                row += 1
            part = min(numel - done, edges[row + 1] - offset - done)
            slots[row].append(
                Slot(
                    param=param,
                    row=row,
                    row_start=offset + done - edges[row],
                    param_start=done,
                    numel=part,
                )
            )
            done += part
    return tuple(tuple(row_slots) for row_slots in slots)


def _verify_rows(layout: BucketLayout) -> None:
    """Check that slots and declared padding cover every offset of the bucket once."""
    starts = layout.row_starts
    spans = sorted(
        [
            *layout.padding,
            *(
                (starts[row] + slot.row_start, starts[row] + slot.row_start + slot.numel)
                for row, slots in enumerate(layout.slots)
                for slot in slots
            ),
        ]
    )
    edges = [(0, 0), *spans, (layout.numel, layout.numel)]
    for (_, stop), (start, _) in pairwise(edges):
        if stop != start:
            raise ConfigError(
                f"bucket layout: offsets {stop} and {start} do not meet: rows are not tiled"
            )
    for row, slots in enumerate(layout.slots):
        for slot in slots:
            if slot.row != row or slot.row_start + slot.numel > layout.row_lengths[row]:
                raise ConfigError(f"bucket layout: {slot} does not fit row {row}")


def _verify_params(layout: BucketLayout) -> None:
    """Check that the slots of all rows cover every parameter once, at its place."""
    starts = layout.row_starts
    covered = dict.fromkeys(layout.params, 0)
    place = dict(zip(layout.params, layout.offsets, strict=True))
    for row, slots in enumerate(layout.slots):
        for slot in slots:
            offset = starts[row] + slot.row_start - slot.param_start
            if place.get(slot.param) != offset or covered[slot.param] != slot.param_start:
                raise ConfigError(f"bucket layout: {slot} is not where its parameter lies")
            covered[slot.param] += slot.numel
    for param, numel in zip(layout.params, layout.numels, strict=True):
        if covered[param] != numel:
            raise ConfigError(
                f"bucket layout: parameter {param} has {covered[param]} of {numel} elements"
            )
