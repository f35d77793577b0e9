"""Which pieces of which matrices go where: integers, computed once from the plan.

The exchange has two stages. First the pieces of a matrix travel over data parallelism, from the
rows that hold them to the owner's row, each tensor-parallel rank with its own shard; then the
shards travel over tensor parallelism, inside that row, to the owner. Updates go back the same way.
A matrix that lies wholly in its owner's row skips the first stage, one that is not divided gathers
nothing in the second: where tensor parallelism replicates it, the owner's own copy serves, and only
the update goes to the others. In other modes than `owner` the shards go to every tensor-parallel
rank and no update comes back, or they stay where they are (`tp_mode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.tp_mode import Home

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one matrix in one row; the same integers on every tensor-parallel rank.

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
class Travel:
    """A piece that leaves its row for the owner's row, and whose update comes back.

    Attributes:
        piece: what travels.
        owner_row: the row it goes to.
        goes_out: whether this tensor-parallel rank sends it; of replicas only the owner's does.
    """

    piece: Piece
    owner_row: int
    goes_out: bool


@dataclass(frozen=True, slots=True)
class RowMatrix:
    """A matrix whose owner is in this rank's row: its local part is put together here.

    Attributes:
        matrix: index in the plan.
        numel: local elements.
        start: its first element in the row (in place), or in the assembly buffer.
        in_place: whether it lies wholly in this row.
        owner: the tensor-parallel rank that orthogonalises it.
        divided: whether tensor parallelism divides it.
        home: which tensor-parallel ranks orthogonalise it.
    """

    matrix: int
    numel: int
    start: int
    in_place: bool
    owner: int
    divided: bool
    home: Home


@dataclass(frozen=True, slots=True)
class ExchangeSchedule:
    """One rank's part in the exchange of one bucket.

    Attributes:
        rows: number of rows.
        row: this rank's row.
        gathered: matrices put together in this row, by matrix index.
        kept: pieces in this row of gathered matrices that do not lie in place.
        leaving: pieces of this row that go to other rows.
        arriving: pieces of other rows that come to this row.
        assembly_numel: elements of the assembly buffer.
        active: whether any matrix of the bucket travels between rows (equal on all ranks).
        crosses_tensor: whether any travels between tensor-parallel ranks (equal on all ranks).
    """

    rows: int
    row: int
    gathered: tuple[RowMatrix, ...]
    kept: tuple[Piece, ...]
    leaving: tuple[Travel, ...]
    arriving: tuple[Travel, ...]
    assembly_numel: int
    active: bool
    crosses_tensor: bool


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


def schedule(
    plan: OwnershipPlan,
    pieces: dict[int, list[Piece]],
    row: int,
    tensor_rank: int,
    homes: Mapping[int, Home],
) -> ExchangeSchedule:
    """One rank's part in the exchange of one bucket.

    Args:
        plan: the ownership plan of the bucket's domain.
        pieces: of the bucket's matrices, see `matrix_pieces`.
        row: this rank's row: its rank in the reduce group.
        tensor_rank: its rank in the tensor-parallel group.
        homes: matrix index -> where it is orthogonalised.
    """
    gathered: list[RowMatrix] = []
    kept: list[Piece] = []
    leaving: list[Travel] = []
    arriving: list[Travel] = []
    assembly = 0
    active = False
    for matrix, parts in pieces.items():
        owner_row, owner = divmod(int(plan.owner[matrix]), plan.tp)
        divided = plan.tp > 1 and plan.params[int(plan.matrix_param[matrix])].sharded
        in_place = len(parts) == 1 and parts[0].row == owner_row
        goes_out = divided or tensor_rank == owner
        active = active or not in_place
        if owner_row == row:
            numel = sum(part.numel for part in parts)
            start = parts[0].row_start if in_place else assembly
            gathered.append(
                RowMatrix(matrix, numel, start, in_place, owner, divided, homes[matrix])
            )
            assembly += 0 if in_place else -(-numel // _ALIGNMENT) * _ALIGNMENT
        for part in () if in_place else parts:
            travel = Travel(part, owner_row, goes_out)
            if part.row == owner_row == row:
                kept.append(part)
            elif part.row == row:
                leaving.append(travel)
            elif owner_row == row:
                arriving.append(travel)
    return ExchangeSchedule(
        rows=plan.dp,
        row=row,
        gathered=tuple(gathered),
        kept=tuple(kept),
        leaving=tuple(leaving),
        arriving=tuple(arriving),
        assembly_numel=assembly,
        active=active,
        crosses_tensor=plan.tp > 1 and any(homes[matrix] != "parts" for matrix in pieces),
    )
