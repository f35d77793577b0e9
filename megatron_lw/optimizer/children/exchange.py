"""The exchange: pieces of cut matrices to their owners, and the updates back.

The schedule is integers computed once from the plan; every rank of the exchange group has its own
and all call the same two all-to-alls for a bucket that has cut matrices. A matrix that lies wholly
in its owner's row is in no schedule: it never moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_lw.distributed.collectives import Handle, all_to_all
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import OwnershipPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one matrix in one row.

    Attributes:
        matrix: index of the matrix in the plan.
        row: the row that holds it.
        row_start: its first element in that row.
        start: its first element in the flattened matrix.
        numel: elements.
    """

    matrix: int
    row: int
    row_start: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix that this rank orthogonalises.

    Attributes:
        matrix: index in the plan.
        start: its first element in this rank's row (whole), or in the assembly buffer (cut).
        numel: elements.
        whole: whether it lies wholly in this rank's row.
    """

    matrix: int
    start: int
    numel: int
    whole: bool


@dataclass(frozen=True, slots=True)
class ExchangeSchedule:
    """What one rank sends and receives for one bucket, on the way out; the way back is its mirror.

    Attributes:
        owned: matrices this rank orthogonalises, the whole ones and the cut ones.
        kept: pieces in this rank's own row of cut matrices that it owns.
        sent: pieces of its row that go to their owners, ordered by owner, then matrix.
        received: pieces that come to it, ordered by the row they come from, then matrix.
        send_splits: elements to each rank.
        receive_splits: elements from each rank.
        assembly_numel: elements of the cut matrices it owns.
        active: whether any rank exchanges anything for this bucket (equal on all ranks).
    """

    owned: tuple[OwnedMatrix, ...]
    kept: tuple[Piece, ...]
    sent: tuple[Piece, ...]
    received: tuple[Piece, ...]
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    assembly_numel: int
    active: bool


def matrix_pieces(plan: OwnershipPlan, layout: BucketLayout, bucket: int) -> dict[int, list[Piece]]:
    """The pieces of every matrix of a bucket, by matrix index, in row order."""
    row_length = layout.row_lengths[0]
    pieces: dict[int, list[Piece]] = {}
    for i in np.flatnonzero(plan.matrix_bucket[plan.pieces.matrix] == bucket).tolist():
        matrix, row = int(plan.pieces.matrix[i]), int(plan.pieces.row[i])
        start = int(plan.pieces.start[i])
        row_start = int(plan.matrix_offset[matrix]) + start - row * row_length
        piece = Piece(matrix, row, row_start, start, int(plan.pieces.numel[i]))
        pieces.setdefault(matrix, []).append(piece)
    return pieces


def schedule(plan: OwnershipPlan, layout: BucketLayout, bucket: int, rank: int) -> ExchangeSchedule:
    """This rank's part in the exchange of one bucket.

    Args:
        plan: the ownership plan of the bucket's domain (tensor-parallel size 1).
        layout: the bucket's layout.
        bucket: its index in the plan.
        rank: this rank in the exchange group.
    """
    owned: list[OwnedMatrix] = []
    kept: list[Piece] = []
    sent: list[tuple[int, Piece]] = []
    received: list[Piece] = []
    send_splits, receive_splits = [0] * plan.dp, [0] * plan.dp
    assembly = 0
    active = False
    for matrix, pieces in matrix_pieces(plan, layout, bucket).items():
        owner = int(plan.owner[matrix])
        numel = sum(piece.numel for piece in pieces)
        whole = len(pieces) == 1 and pieces[0].row == owner
        active = active or not whole
        if owner == rank:
            start = pieces[0].row_start if whole else assembly
            owned.append(OwnedMatrix(matrix, start, numel, whole))
            assembly += 0 if whole else numel
        for piece in () if whole else pieces:
            if piece.row == rank and owner == rank:
                kept.append(piece)
            elif piece.row == rank:
                sent.append((owner, piece))
                send_splits[owner] += piece.numel
            elif owner == rank:
                received.append(piece)
                receive_splits[piece.row] += piece.numel
    return ExchangeSchedule(
        owned=tuple(owned),
        kept=tuple(kept),
        sent=tuple(piece for _, piece in sorted(sent, key=lambda s: (s[0], s[1].matrix))),
        received=tuple(sorted(received, key=lambda p: (p.row, p.matrix))),
        send_splits=tuple(send_splits),
        receive_splits=tuple(receive_splits),
        assembly_numel=assembly,
        active=active,
    )


class ExchangeBuffers:
    """Workspace for the exchange of one bucket at a time, large enough for any of `schedules`."""

    def __init__(
        self, schedules: Iterable[ExchangeSchedule], dtype: torch.dtype, device: torch.device
    ) -> None:
        plans = list(schedules)
        sizes = (
            max((p.assembly_numel for p in plans), default=0),
            max((sum(p.send_splits) for p in plans), default=0),
            max((sum(p.receive_splits) for p in plans), default=0),
        )
        self.assembly, self.sent, self.received = (
            torch.empty(size, dtype=dtype, device=device) for size in sizes
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        buffers = (self.assembly, self.sent, self.received)
        return sum(b.numel() * b.element_size() for b in buffers)


class Exchange:
    """Carries one bucket's cut matrices.

    Attributes:
        assembly: cut matrices this rank owns, whole, one after another: `[assembly_numel]`.
            Aliases the buffers, so it is valid from `assemble` until the buffers serve another
            bucket.
    """

    def __init__(self, plan: ExchangeSchedule, group: Group, buffers: ExchangeBuffers) -> None:
        self.schedule = plan
        self._group = group
        self._starts = {m.matrix: m.start for m in plan.owned if not m.whole}
        self.assembly = buffers.assembly[: plan.assembly_numel]
        self._sent = buffers.sent[: sum(plan.send_splits)]
        self._received = buffers.received[: sum(plan.receive_splits)]

    def start_out(self, row: torch.Tensor, *, async_op: bool) -> Handle:
        """Send this row's pieces of cut matrices to their owners.

        Args:
            row: `[row_length]` in the exchange dtype.
            async_op: return before the pieces are there.

        Collective: all-to-all over the exchange group, on every rank, if the bucket is active.
        """
        if not self.schedule.active:
            return Handle()
        self._copy_row(self._sent, self.schedule.sent, row, into_row=False)
        return all_to_all(
            self._received,
            self._sent,
            self.schedule.receive_splits,
            self.schedule.send_splits,
            self._group,
            async_op=async_op,
        )

    def assemble(self, row: torch.Tensor) -> None:
        """Put received and own pieces together in `assembly`."""
        self._copy_assembly(self._received, into_assembly=True)
        for piece in self.schedule.kept:
            start = self._starts[piece.matrix] + piece.start
            self.assembly[start : start + piece.numel] = _part(row, piece)

    def start_back(self, row: torch.Tensor, *, async_op: bool) -> Handle:
        """Send the updates in `assembly` back to the rows; own pieces go to `row` at once.

        Collective: all-to-all over the exchange group, on every rank, if the bucket is active.
        """
        if not self.schedule.active:
            return Handle()
        for piece in self.schedule.kept:
            start = self._starts[piece.matrix] + piece.start
            _part(row, piece).copy_(self.assembly[start : start + piece.numel])
        self._copy_assembly(self._received, into_assembly=False)
        return all_to_all(
            self._sent,
            self._received,
            self.schedule.send_splits,
            self.schedule.receive_splits,
            self._group,
            async_op=async_op,
        )

    def disassemble(self, row: torch.Tensor) -> None:
        """Put the updates that came back into this rank's row."""
        self._copy_row(self._sent, self.schedule.sent, row, into_row=True)

    def _copy_row(
        self, buffer: torch.Tensor, pieces: tuple[Piece, ...], row: torch.Tensor, *, into_row: bool
    ) -> None:
        cursor = 0
        for piece in pieces:
            wire = buffer[cursor : cursor + piece.numel]
            if into_row:
                _part(row, piece).copy_(wire)
            else:
                wire.copy_(_part(row, piece))
            cursor += piece.numel

    def _copy_assembly(self, buffer: torch.Tensor, *, into_assembly: bool) -> None:
        cursor = 0
        for piece in self.schedule.received:
            start = self._starts[piece.matrix] + piece.start
            place = self.assembly[start : start + piece.numel]
            wire = buffer[cursor : cursor + piece.numel]
            if into_assembly:
                place.copy_(wire)
            else:
                wire.copy_(place)
            cursor += piece.numel


def _part(row: torch.Tensor, piece: Piece) -> torch.Tensor:
    return row[piece.row_start : piece.row_start + piece.numel]
