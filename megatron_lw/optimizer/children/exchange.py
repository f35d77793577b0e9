"""The exchange: pieces of matrices to their owners, and the updates back.

The schedule is integers, computed once from the plan. Every rank of the exchange group
(data-parallel rows x tensor-parallel ranks) has its own part of it, and all call the same two
all-to-alls for a bucket in which anything moves. A piece is the part of one matrix in one row;
where tensor parallelism divides the matrix, each tensor-parallel rank holds such a piece of its own
shard, and where it replicates it, all hold the same piece, one of them sends it, and all receive
the update. A matrix that lies wholly in its owner's row, undivided, is in no schedule: it never
moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_lw.distributed.collectives import Handle, all_to_all
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.boxes import Box, BoxPair
from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import OwnershipPlan

ShardBoxes = tuple[tuple[BoxPair, ...], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one matrix in one row; the same integers for every tensor-parallel rank.

    Attributes:
        matrix: index of the matrix in the plan.
        row: the row that holds it.
        row_start: its first element in that row.
        start: its first element in the flattened local matrix.
        numel: elements.
    """

    matrix: int
    row: int
    row_start: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Hop:
    """A piece on its way between a row and its owner.

    Attributes:
        rank: the rank at the other end, in the exchange group.
        shard: the tensor-parallel rank whose elements they are; 0 where the matrix is not divided.
        piece: what travels.
    """

    rank: int
    shard: int
    piece: Piece

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key: both ends of a pair of ranks list the hops between them in the same order."""
        return (self.rank, self.piece.matrix, self.shard, self.piece.start)


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix that this rank orthogonalises.

    Attributes:
        matrix: index in the plan.
        start: its first element in this rank's row (in place), or in the assembly buffer.
        numel: elements of the whole matrix.
        shards: tensor-parallel shards it is put together from.
        in_place: whether it lies wholly and undivided in this rank's row.
    """

    matrix: int
    start: int
    numel: int
    shards: int
    in_place: bool


@dataclass(frozen=True, slots=True)
class ExchangeSchedule:
    """What one rank sends and receives for one bucket.

    Attributes:
        owned: matrices this rank orthogonalises.
        kept: pieces in this rank's row of matrices that it assembles itself.
        sent: pieces of its row that go to their owners.
        received: pieces that come to it as the owner.
        returned: updates that go from it, as the owner, to the rows.
        landed: updates that come to its row.
        assembly_numel: elements of the matrices that it assembles.
        ranks: size of the exchange group.
        active: whether anything moves for this bucket on any rank (equal on all ranks).
    """

    owned: tuple[OwnedMatrix, ...]
    kept: tuple[Hop, ...]
    sent: tuple[Hop, ...]
    received: tuple[Hop, ...]
    returned: tuple[Hop, ...]
    landed: tuple[Hop, ...]
    assembly_numel: int
    ranks: int
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
        plan: the ownership plan of the bucket's domain.
        layout: the bucket's layout.
        bucket: its index in the plan.
        rank: this rank in the exchange group: `row * tp + tensor-parallel rank`.
    """
    owned: list[OwnedMatrix] = []
    hops: dict[str, list[Hop]] = {k: [] for k in ("kept", "sent", "received", "returned", "landed")}
    assembly = 0
    active = False
    for matrix, pieces in matrix_pieces(plan, layout, bucket).items():
        owner = int(plan.owner[matrix])
        local_numel = sum(piece.numel for piece in pieces)
        divided = plan.params[int(plan.matrix_param[matrix])].sharded and plan.tp > 1
        in_place = plan.tp == 1 and len(pieces) == 1 and pieces[0].row == owner
        shards = plan.tp if divided else 1
        if owner == rank:
            start = pieces[0].row_start if in_place else assembly
            owned.append(OwnedMatrix(matrix, start, shards * local_numel, shards, in_place))
            assembly += 0 if in_place else shards * local_numel
        if not in_place:
            active = True
            for piece in pieces:
                _add_hops(hops, piece, owner, rank, plan.tp, divided)
    return ExchangeSchedule(
        owned=tuple(owned),
        **{name: tuple(sorted(found, key=lambda hop: hop.order)) for name, found in hops.items()},
        assembly_numel=assembly,
        ranks=plan.dp * plan.tp,
        active=active,
    )


def _add_hops(
    hops: Mapping[str, list[Hop]], piece: Piece, owner: int, rank: int, tp: int, divided: bool
) -> None:
    """Add what `rank` has to do with one piece of a matrix that does not stay in place.

    Of tensor-parallel replicas the one in the owner's own tensor-parallel place sends.
    """
    for t in range(tp):
        holder = piece.row * tp + t
        shard = t if divided else 0
        sends = divided or t == owner % tp
        if holder == owner == rank:
            hops["kept"].append(Hop(owner, shard, piece))
        elif holder == rank:
            if sends:
                hops["sent"].append(Hop(owner, shard, piece))
            hops["landed"].append(Hop(owner, shard, piece))
        elif owner == rank and holder != owner:
            if sends:
                hops["received"].append(Hop(holder, shard, piece))
            hops["returned"].append(Hop(holder, shard, piece))


class ExchangeBuffers:
    """Workspace for the exchange of one bucket at a time, large enough for any of `schedules`.

    Attributes:
        shards: matrices this rank assembles, shard after shard.
        whole: the same matrices in their global order, where that differs.
        at_row: what leaves and reaches this rank's row.
        at_owner: what reaches and leaves this rank as an owner.
    """

    def __init__(
        self, schedules: Iterable[ExchangeSchedule], dtype: torch.dtype, device: torch.device
    ) -> None:
        plans = list(schedules)
        sizes = (
            max((p.assembly_numel for p in plans), default=0),
            max((p.assembly_numel for p in plans if any(m.shards > 1 for m in p.owned)), default=0),
            max((max(_numel(p.sent), _numel(p.landed)) for p in plans), default=0),
            max((max(_numel(p.received), _numel(p.returned)) for p in plans), default=0),
        )
        self.shards, self.whole, self.at_row, self.at_owner = (
            torch.empty(size, dtype=dtype, device=device) for size in sizes
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(b.nbytes for b in (self.shards, self.whole, self.at_row, self.at_owner))


class _Leg(NamedTuple):
    """One way of the exchange from this rank's point of view."""

    hops: tuple[Hop, ...]
    numel: int
    splits: list[int]


class Exchange:
    """Carries one bucket's matrices to their owners and the updates back.

    Attributes:
        schedule: what moves.
        matrices: matrix index -> `[rows, cols]` in global order, for the matrices that this rank
            assembles. Aliases the buffers, so it is valid from `assemble` until they serve another
            bucket; what is written there is what `start_back` sends.
    """

    def __init__(
        self,
        plan: ExchangeSchedule,
        group: Group,
        buffers: ExchangeBuffers,
        shapes: Mapping[int, tuple[int, int]],
        boxes: Mapping[int, ShardBoxes],
    ) -> None:
        self.schedule = plan
        self._group = group
        self._buffers = buffers
        self._sent, self._received, self._returned, self._landed = (
            _Leg(hops, _numel(hops), _splits(hops, plan.ranks))
            for hops in (plan.sent, plan.received, plan.returned, plan.landed)
        )
        self._flats: dict[tuple[int, int], torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.matrices: dict[int, torch.Tensor] = {}
        for owned in plan.owned:
            if not owned.in_place:
                self._place(owned, shapes[owned.matrix], boxes.get(owned.matrix, ()))

    def start_out(self, row: torch.Tensor, *, label: str = "") -> Handle:
        """Send this row's pieces to their owners.

        Args:
            row: `[row_length]` in the exchange dtype.
            label: what messages call the bucket.

        Collective: all-to-all over the exchange group, on every rank, if the bucket is active;
        returns before it is done.
        """
        if not self.schedule.active:
            return Handle()
        outgoing = self._buffers.at_row[: self._sent.numel]
        for hop, wire in _along(outgoing, self._sent.hops):
            wire.copy_(_part(row, hop.piece))
        incoming = self._buffers.at_owner[: self._received.numel]
        return all_to_all(
            incoming,
            outgoing,
            self._received.splits,
            self._sent.splits,
            self._group,
            async_op=True,
            label=f"exchange, {label}",
        )

    def assemble(self, row: torch.Tensor) -> None:
        """Put received and own pieces together in `matrices`."""
        for hop, wire in _along(self._buffers.at_owner, self._received.hops):
            self._at(hop).copy_(wire)
        for hop in self.schedule.kept:
            self._at(hop).copy_(_part(row, hop.piece))
        for shard_box, global_box in self._copies:
            global_box.copy_(shard_box)

    def start_back(self, row: torch.Tensor, *, label: str = "") -> Handle:
        """Send the updates in `matrices` to the rows; this row's own pieces are there at once.

        Collective: all-to-all over the exchange group, on every rank, if the bucket is active;
        returns before it is done.
        """
        if not self.schedule.active:
            return Handle()
        for shard_box, global_box in self._copies:
            shard_box.copy_(global_box)
        for hop in self.schedule.kept:
            _part(row, hop.piece).copy_(self._at(hop))
        outgoing = self._buffers.at_owner[: self._returned.numel]
        for hop, wire in _along(outgoing, self._returned.hops):
            wire.copy_(self._at(hop))
        incoming = self._buffers.at_row[: self._landed.numel]
        return all_to_all(
            incoming,
            outgoing,
            self._landed.splits,
            self._returned.splits,
            self._group,
            async_op=True,
            label=f"return of updates, {label}",
        )

    def disassemble(self, row: torch.Tensor) -> None:
        """Put the updates that came back into this rank's row."""
        for hop, wire in _along(self._buffers.at_row, self._landed.hops):
            _part(row, hop.piece).copy_(wire)

    def _place(self, owned: OwnedMatrix, shape: tuple[int, int], boxes: ShardBoxes) -> None:
        """Give a matrix its place in the buffers, and find the copies that order its shards."""
        run = slice(owned.start, owned.start + owned.numel)
        flat = self._buffers.shards[run]
        for shard, part in enumerate(flat.chunk(owned.shards)):
            self._flats[owned.matrix, shard] = part
        if all(_is_row_block(pairs, shape) for pairs in boxes):
            self.matrices[owned.matrix] = flat.view(shape)
            return
        whole = self._buffers.whole[run].view(shape)
        self.matrices[owned.matrix] = whole
        for shard, pairs in enumerate(boxes):
            rows = max(p.local.start[0] + p.local.shape[0] for p in pairs)
            local = self._flats[owned.matrix, shard].view(rows, -1)
            self._copies += [(_box(local, p.local), _box(whole, p.world)) for p in pairs]

    def _at(self, hop: Hop) -> torch.Tensor:
        flat = self._flats[hop.piece.matrix, hop.shard]
        return flat[hop.piece.start : hop.piece.start + hop.piece.numel]


def _numel(hops: tuple[Hop, ...]) -> int:
    return sum(hop.piece.numel for hop in hops)


def _splits(hops: tuple[Hop, ...], ranks: int) -> list[int]:
    splits = [0] * ranks
    for hop in hops:
        splits[hop.rank] += hop.piece.numel
    return splits


def _along(wire: torch.Tensor, hops: tuple[Hop, ...]) -> Iterator[tuple[Hop, torch.Tensor]]:
    """Each hop with its run of a buffer that holds them one after another."""
    cursor = 0
    for hop in hops:
        yield hop, wire[cursor : cursor + hop.piece.numel]
        cursor += hop.piece.numel


def _part(row: torch.Tensor, piece: Piece) -> torch.Tensor:
    return row[piece.row_start : piece.row_start + piece.numel]


def _box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    (row, col), (rows, cols) = box.start, box.shape
    return tensor[row : row + rows, col : col + cols]


def _is_row_block(pairs: tuple[BoxPair, ...], shape: tuple[int, int]) -> bool:
    """Whether a shard is one run of whole rows, so that shards in order are the matrix in order."""
    return len(pairs) == 1 and pairs[0].world.shape[1] == shape[1]
