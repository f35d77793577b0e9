"""Publish: the new weights from the masters' rows to the model on every rank.

Three functions do it, in this order for each bucket, whether or not anything overlaps: `start`
casts the row and sends it, `wait` waits, `land` copies what arrived into the model. A bucket whose
parameters have one dtype is gathered in place, in its weight storage, and has nothing to land. A
bucket of several dtypes travels packed: each row is the bytes of its slots, one after another, each
in its own dtype (an FP32 weight stays FP32), all rows padded to the longest. A bucket with
quantised weights travels as `fp8.wire` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from megatron_lw.distributed.buffers import BucketBuffer, GradState, WeightState
from megatron_lw.distributed.collectives import Handle, all_gather_rows, all_reduce, own_row
from megatron_lw.fp8.quantise import History
from megatron_lw.fp8.wire import QuantisedWire
from megatron_lw.optimizer.layout import Slot
from megatron_lw.optimizer.masters import MasterRow

_WIRE_ALIGNMENT = 16


class Wire(Protocol):
    """How one bucket's rows travel."""

    @property
    def buffer(self) -> torch.Tensor:
        """What is gathered: `[D * row]`, this rank's row filled by `stage`."""

    @property
    def maxima(self) -> torch.Tensor | None:
        """What the ranks must agree on between `measure` and `stage`; None if nothing."""

    def measure(self, master: torch.Tensor) -> None:
        """Provide the buffer, and find the maxima of this rank's row."""

    def stage(self, master: torch.Tensor, history: History) -> None:
        """Cast the fp32 master row into this rank's row of the buffer."""

    def land(self) -> None:
        """Copy what arrived into the parameters."""


class InPlaceWire:
    """The weight storage itself, for a bucket of one dtype."""

    maxima: torch.Tensor | None = None

    def __init__(self, bucket: BucketBuffer, weights: torch.Tensor) -> None:
        self.buffer = weights
        self._row = own_row(weights, bucket.group)

    def measure(self, master: torch.Tensor) -> None:
        """Nothing to do."""

    def stage(self, master: torch.Tensor, history: History) -> None:
        """Cast the row; a cast from fp32 rounds to nearest even."""
        self._row.copy_(master)

    def land(self) -> None:
        """Nothing to do: the parameters are views of what was gathered."""


class PackedWire:
    """A byte buffer for a bucket of several dtypes."""

    maxima: torch.Tensor | None = None

    def __init__(self, bucket: BucketBuffer) -> None:
        self._own: list[tuple[Slot, torch.Tensor]] = []
        self._landings: list[tuple[torch.Tensor, torch.Tensor]] = []
        params = dict(zip(bucket.layout.params, bucket.params.values(), strict=True))
        offsets, row_nbytes = _packed_offsets(bucket)
        self.buffer = torch.zeros(
            row_nbytes * bucket.group.size, dtype=torch.uint8, device=bucket.grads.device
        )
        for row, slots in enumerate(bucket.layout.slots):
            for slot, offset in zip(slots, offsets[row], strict=True):
                param = params[slot.param].detach().view(-1)
                start = row * row_nbytes + offset
                nbytes = slot.numel * param.element_size()
                wire = self.buffer[start : start + nbytes].view(param.dtype)
                place = param[slot.param_start : slot.param_start + slot.numel]
                self._landings.append((place, wire))
                if row == bucket.group.rank:
                    self._own.append((slot, wire))

    def measure(self, master: torch.Tensor) -> None:
        """Nothing to do."""

    def stage(self, master: torch.Tensor, history: History) -> None:
        """Cast each slot of the row to its parameter's dtype."""
        for slot, wire in self._own:
            wire.copy_(master[slot.row_start : slot.row_start + slot.numel])

    def land(self) -> None:
        """Copy every slot, this rank's too, into the parameters."""
        for place, wire in self._landings:
            place.copy_(wire)


def wire_for(bucket: BucketBuffer, fp8_gather: bool = False) -> Wire:
    """The cheapest wire that gives every rank `dtype(master)` for each parameter.

    Args:
        bucket: what it holds.
        fp8_gather: whether FP8 travels for quantised weights where that is cheaper than BF16.
    """
    if bucket.quantised:
        return QuantisedWire(bucket, fp8_gather)
    if bucket.weights is not None:
        return InPlaceWire(bucket, bucket.weights)
    return PackedWire(bucket)


class Publisher:
    """Publishes one bucket: master row, wire and the bucket's state together."""

    def __init__(self, master: MasterRow, *, fp8_gather: bool = False) -> None:
        self.master = master
        self.bucket = master.bucket
        self.wire = wire_for(master.bucket, fp8_gather)
        self.handle = Handle()

    @property
    def outstanding(self) -> bool:
        """Whether rows are still on their way, or have arrived and not been landed."""
        return self.bucket.weight_state is WeightState.GATHERING

    @torch.no_grad()
    def start(self, history: History = "keep") -> None:
        """Cast this rank's row and send it; an earlier gather is landed first.

        Args:
            history: whether the masters are a further update, which delayed scales follow.

        Collective: all-gather over the bucket's reduce group; returns before it is done. Before it
        an all-reduce (max) where ranks must agree on the maxima of blocks.
        """
        self.handle.wait()
        try:
            try:
                self.wait_and_land()
                self.wire.measure(self.master.row)
            finally:
                self._agree_on_maxima()
            self.wire.stage(self.master.row, history)
        finally:  # other ranks wait for it
            self.bucket.weight_state = WeightState.GATHERING
            self.handle = all_gather_rows(
                self.wire.buffer,
                self.bucket.group,
                async_op=True,
                label=f"publish {self.bucket.label}",
            )

    def _agree_on_maxima(self) -> None:
        maxima = self.wire.maxima
        if maxima is not None and maxima.numel():
            all_reduce(maxima, self.bucket.group, "max", label=f"maxima of {self.bucket.label}")

    @torch.no_grad()
    def wait_and_land(self) -> None:
        """Wait for the rows of all ranks and put them into the model."""
        if self.outstanding:
            self.handle.wait()
            self.wire.land()
            self.bucket.weight_state = WeightState.PUBLISHED


def return_storage(publishers: Iterable[Publisher]) -> None:
    """Land gathers that hold gradient storage, of weights that no forward has read."""
    for publisher in publishers:
        if publisher.bucket.grad_state is GradState.WEIGHTS:
            publisher.wait_and_land()


def _packed_offsets(bucket: BucketBuffer) -> tuple[list[list[int]], int]:
    """Byte offset of each slot inside its row, and the common row length in bytes."""
    params = dict(zip(bucket.layout.params, bucket.params.values(), strict=True))
    offsets: list[list[int]] = []
    longest = _WIRE_ALIGNMENT
    for slots in bucket.layout.slots:
        cursor = 0
        row: list[int] = []
        for slot in slots:
            row.append(cursor)
            nbytes = slot.numel * params[slot.param].element_size()
            cursor += -(-nbytes // _WIRE_ALIGNMENT) * _WIRE_ALIGNMENT
        offsets.append(row)
        longest = max(longest, cursor)
    return offsets, longest
