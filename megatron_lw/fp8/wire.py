"""`QuantisedWire`: how a bucket travels that holds quantised weights.

Each weight has one way, and all ways give `quantise(bf16(master))` on every rank, byte for byte:

| way | bytes a weight | what happens |
|---|---|---|
| plain | 2 or 4 | not quantised: its own dtype travels |
| bf16 | 2 | BF16 travels, every rank quantises, the one that sent it too |
| fp8 | 1 | the ranks agree on maxima of blocks; each casts what its row holds; bytes travel |
| rows | 1.03 | row-wise MXFP8 travels, bytes and codes; the column-wise plane is derived |

A row holds its slots one after another. Where all weights have one width they lie as in the
bucket, so that also a matrix that is cut arrives in one piece. The wire is the bucket's gradient
storage, lent by its state machine. While that holds gradients it is memory of its own, for one
gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.fp8.kinds import is_quantised
from megatron_lw.fp8.quantise import (
    History,
    cast_row_blocks,
    cast_run,
    derive_columns,
    measure,
    quantise,
    set_scales,
)
from megatron_lw.fp8.recipe import MX_BLOCK, Recipe
from megatron_lw.fp8.runs import Part, Run, plan_runs
from megatron_lw.fp8.weights import QuantisedWeights
from megatron_lw.optimizer.layout import Slot

Way = Literal["plain", "bf16", "fp8", "rows"]
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slot's bytes in the wire.

    Attributes:
        slot: which elements of which parameter.
        way: how it travels.
        start: first byte in the wire.
        nbytes: how many.
    """

    slot: Slot
    way: Way
    start: int
    nbytes: int

    def of(self, wire: torch.Tensor) -> torch.Tensor:
        """Its bytes. Aliases the wire."""
        return wire[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traveller:
    """The quantised weights of one recipe, and their way.

    Attributes:
        weights: the weights.
        way: how they travel.
        matrices: parameter index -> index among them.
        runs: what this rank's row holds of them (`fp8`), or where they lie in a wire of BF16 in
            which each is in one piece (`bf16`).
        maxima: where their maxima lie among those of the bucket.
    """

    weights: QuantisedWeights
    way: Way
    matrices: dict[int, int]
    runs: tuple[Run, ...]
    maxima: slice


def way_of(recipe: Recipe, fp8_gather: bool) -> Way:
    """The cheapest way for a recipe.

    Args:
        recipe: the format.
        fp8_gather: whether FP8 may travel.
    """
    if not fp8_gather or (recipe.format == "mxfp8" and not recipe.derive_columns):
        return "bf16"
    return "rows" if recipe.derive_columns else "fp8"


class QuantisedWire:
    """The wire of one bucket.

    Args:
        bucket: weights and gradients.
        fp8_gather: whether FP8 travels where that is cheaper than BF16.

    Attributes:
        buffer: uint8, one row a rank; from `measure` until `land`.
        maxima: bf16, this rank's from `measure`, over all ranks before `stage`.
    """

    def __init__(self, bucket: BucketBuffer, fp8_gather: bool) -> None:
        self._bucket = bucket
        params = dict(zip(bucket.layout.params, bucket.params.values(), strict=True))
        # Made now, as whoever touches a parameter while a gather is under way waits for it.
        self._plain = {i: p.detach().view(-1) for i, p in params.items() if not is_quantised(p)}
        self._index = {name: i for i, name in zip(bucket.layout.params, bucket.names, strict=True)}
        self._ways: dict[int, Way] = dict.fromkeys(bucket.layout.params, "plain")
        for weights in bucket.quantised:
            for name in weights.params:
                self._ways[self._index[name]] = way_of(weights.recipe, fp8_gather)
        self._pieces, self._row_nbytes, self._as_bucket = self._lay_out()
        self._travellers = self._travel()
        end = self._travellers[-1].maxima.stop
        self.maxima = torch.zeros(end, dtype=torch.bfloat16, device=bucket.grads.device)
        self.buffer = torch.empty(0, dtype=torch.uint8, device=bucket.grads.device)
        self._values = self.buffer
        self._history: History = "keep"

    def measure(self, master: torch.Tensor) -> None:
        """Borrow the storage, and find the maxima of what this rank's row holds."""
        size = self._row_nbytes * self._bucket.group.size
        lent = self._bucket.lend()
        if lent is None:
            lent = torch.empty(size, dtype=torch.uint8, device=self.maxima.device)
        self.buffer = lent[:size]
        if any(each.way in ("fp8", "rows") for each in self._travellers):
            self._values = master.to(torch.bfloat16)
        for each in self._travellers:
            if each.way == "fp8":
                found = measure(self._values, each.runs, each.weights.planes.layout)
                self.maxima[each.maxima].copy_(found)

    def stage(self, master: torch.Tensor, history: History) -> None:
        """Cast what this rank's row holds into its row of the buffer.

        Args:
            master: fp32 row.
            history: whether these masters are a further update; see `quantise`.
        """
        self._history = history
        for piece in self._pieces[self._bucket.group.rank]:
            slot = piece.slot
            part = slice(slot.row_start, slot.row_start + slot.numel)
            if piece.way == "plain":
                piece.of(self.buffer).view(self._plain[slot.param].dtype).copy_(master[part])
            elif piece.way == "bf16":
                piece.of(self.buffer).view(torch.bfloat16).copy_(master[part])
            elif piece.way == "rows":
                data, codes = _split(piece.of(self.buffer))
                cast_row_blocks(self._values[part], data, codes)
        for each in self._travellers:
            if each.way == "fp8":
                self._cast(each)
        self._values = self.maxima.new_empty(0)

    def land(self) -> None:
        """Put what arrived into the weights, both planes of every one, and return the storage."""
        for each in self._travellers:
            if each.way == "bf16" and self._as_bucket:
                values = self.buffer.view(torch.bfloat16)
                quantise(values, each.runs, each.weights.planes, self._history)
            elif each.way == "bf16":
                each.weights.quantise(self._assembled(each), self._history)
        for row in self._pieces:
            for piece in row:
                self._land(piece)
        for each in self._travellers:
            if each.way in ("fp8", "rows"):
                derive_columns(each.weights.planes)
            each.weights.deliver()
        self.buffer = self.buffer.new_empty(0)
        self._bucket.take_back()

    def _cast(self, each: Traveller) -> None:
        """Scales of all blocks from the agreed maxima; bytes of what this rank holds."""
        planes = each.weights.planes
        maxima = self.maxima[each.maxima].float()
        multipliers = set_scales(planes, maxima, torch.bfloat16, self._history)
        starts = {
            each.matrices[piece.slot.param]: piece.start
            for piece in self._pieces[self._bucket.group.rank]
            if piece.slot.param in each.matrices
        }
        for run in each.runs:
            start = starts[run.matrix]
            out = self.buffer[start : start + run.numel]
            cast_run(self._values, run, multipliers, planes.layout, out)

    def _land(self, piece: Piece) -> None:
        slot, wire = piece.slot, piece.of(self.buffer)
        if piece.way == "plain":
            param = self._plain[slot.param]
            param[slot.param_start : slot.param_start + slot.numel].copy_(wire.view(param.dtype))
            return
        if piece.way == "bf16":
            return
        each = next(t for t in self._travellers if slot.param in t.matrices)
        planes, matrix = each.weights.planes, each.matrices[slot.param]
        at = planes.layout.data[matrix] + slot.param_start
        data, codes = _split(wire) if piece.way == "rows" else (wire, None)
        planes.row_data[at : at + slot.numel].copy_(data)
        if codes is not None:
            at = planes.layout.row_scales[matrix] + slot.param_start // MX_BLOCK
            planes.row_scale[at : at + codes.numel()].copy_(codes)

    def _assembled(self, each: Traveller) -> torch.Tensor:
        """BF16 values one after another, out of the pieces of a wire of several widths."""
        starts = each.weights.planes.layout.data
        values = torch.empty(starts[-1], dtype=torch.bfloat16, device=self.buffer.device)
        for piece in (piece for row in self._pieces for piece in row):
            if piece.slot.param in each.matrices:
                at = starts[each.matrices[piece.slot.param]] + piece.slot.param_start
                values[at : at + piece.slot.numel].copy_(piece.of(self.buffer).view(torch.bfloat16))
        return values

    def _nbytes(self, param: int, numel: int) -> int:
        """Bytes of some elements of a parameter."""
        if self._ways[param] == "rows":
            return numel + numel // MX_BLOCK
        if self._ways[param] == "plain":
            return numel * self._plain[param].element_size()
        return numel * {"bf16": 2, "fp8": 1}[self._ways[param]]

    def _lay_out(self) -> tuple[list[list[Piece]], int, bool]:
        """Pieces of each row, bytes of a row, and whether they lie as in the bucket."""
        layout = self._bucket.layout
        widths = {self._nbytes(param, MX_BLOCK) / MX_BLOCK for param in layout.params}
        width = int(min(widths))
        as_bucket = len(widths) == 1 and "rows" not in self._ways.values()
        starts: list[list[int]] = []
        longest = layout.row_lengths[0] * width if as_bucket else _ALIGNMENT
        for slots in layout.slots:
            cursor, row = 0, []
            for slot in slots:
                row.append(slot.row_start * width if as_bucket else cursor)
                cursor += -(-self._nbytes(slot.param, slot.numel) // _ALIGNMENT) * _ALIGNMENT
            starts.append(row)
            longest = longest if as_bucket else max(longest, cursor)
        pieces = [
            [
                Piece(
                    slot=slot,
                    way=self._ways[slot.param],
                    start=number * longest + start,
                    nbytes=self._nbytes(slot.param, slot.numel),
                )
                for slot, start in zip(slots, row, strict=True)
            ]
            for number, (slots, row) in enumerate(zip(layout.slots, starts, strict=True))
        ]
        return pieces, longest, as_bucket

    def _travel(self) -> tuple[Traveller, ...]:
        bucket, end = self._bucket, 0
        offsets = dict(zip(bucket.layout.params, bucket.layout.offsets, strict=True))
        made: list[Traveller] = []
        for weights in bucket.quantised:
            matrices = {self._index[name]: i for i, name in enumerate(weights.params)}
            way = self._ways[next(iter(matrices))]
            layout = weights.planes.layout
            own = bucket.layout.slots[bucket.group.rank]
            if way == "bf16":
                parts = [
                    Part(matrix=i, start=0, numel=rows * cols, offset=offsets[param])
                    for (param, i), (rows, cols) in zip(
                        matrices.items(), layout.shapes, strict=True
                    )
                ]
            else:
                parts = _parts(own, matrices)
            count = layout.row_scales[-1] if way == "fp8" else 0
            made.append(
                Traveller(
                    weights=weights,
                    way=way,
                    matrices=matrices,
                    runs=plan_runs(parts, layout),
                    maxima=slice(end, end + count),
                )
            )
            end += count
        return tuple(made)


def _parts(slots: Sequence[Slot], matrices: dict[int, int]) -> list[Part]:
    """What a row holds of some weights."""
    return [
        Part(
            matrix=matrices[slot.param],
            start=slot.param_start,
            numel=slot.numel,
            offset=slot.row_start,
        )
        for slot in slots
        if slot.param in matrices
    ]


def _split(wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and codes of a piece of row-wise MXFP8. A cut never parts a block: 64 divides it."""
    numel = wire.numel() // (MX_BLOCK + 1) * MX_BLOCK
    return wire[:numel], wire[numel:]
