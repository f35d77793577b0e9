"""What a matrix child keeps of one bucket: views, made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_lw.distributed.collectives import Handle
from megatron_lw.groups import DomainGroups
from megatron_lw.optimizer.children.base import GroupRange
from megatron_lw.optimizer.children.exchange import RowExchange, Shape, TensorExchange
from megatron_lw.optimizer.children.ns_workspace import group_into_batches, workspace_numel
from megatron_lw.optimizer.children.place import Place
from megatron_lw.optimizer.children.schedule import ExchangeSchedule, Piece
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.workspace import BATCH_BELOW, BATCH_WORKSPACE


@dataclass(frozen=True, slots=True)
class RowPart:
    """The matrices of one parameter group and shape in this rank's row.

    Attributes:
        group: name of the parameter group.
        shape: rows and columns of each whole (global) matrix.
        weights: views of the master row, one a matrix.
        updates: views of the workspace row, one a matrix.
    """

    group: str
    shape: Shape
    weights: tuple[torch.Tensor, ...]
    updates: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class RefinedMatrix:
    """A matrix that its owner changes after orthogonalising it.

    Attributes:
        place: which matrix of which parameter.
        group: name of the parameter group.
        update: [rows, columns], where Newton-Schulz leaves it.
        states: fp32, by state key.
    """

    place: Place
    group: str
    update: torch.Tensor
    states: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class MatrixBucket:
    """What the child keeps of one bucket.

    Attributes:
        master: its fp32 row.
        momentum: fp32 row.
        row: workspace row in the exchange dtype: Newton-Schulz inputs, then updates.
        ranges: runs of one parameter group.
        parts: matrices in this row, by group and shape.
        rows: carries pieces between rows.
        tensor: carries shards between tensor-parallel ranks.
        owned: matrices that this rank orthogonalises, `[rows, columns]`, in batches.
        refined: the same, if they are changed after that.
        handle: the all-to-all under way.
    """

    master: MasterRow
    momentum: torch.Tensor
    row: torch.Tensor
    ranges: tuple[GroupRange, ...]
    parts: tuple[RowPart, ...]
    rows: RowExchange
    tensor: TensorExchange
    owned: tuple[list[torch.Tensor], ...]
    refined: tuple[RefinedMatrix, ...]
    handle: Handle = field(default_factory=Handle)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.master.bucket.label


def row_parts(
    pieces: Sequence[Piece],
    shapes: Mapping[int, Shape],
    of_group: Mapping[int, str],
    master: torch.Tensor,
    row: torch.Tensor,
) -> tuple[RowPart, ...]:
    """The pieces of a row by group and shape, so that one fused call steps each kind."""
    kinds: dict[tuple[str, Shape], list[slice]] = {}
    for piece in pieces:
        kind = (of_group[piece.matrix], shapes[piece.matrix])
        run = slice(piece.row_start, piece.row_start + piece.numel)
        kinds.setdefault(kind, []).append(run)
    return tuple(
        RowPart(group, shape, tuple(master[run] for run in runs), tuple(row[run] for run in runs))
        for (group, shape), runs in kinds.items()
    )


def iteration_workspace(
    plan: OwnershipPlan, bucket: ExchangeSchedule, groups: DomainGroups, pad: bool
) -> int:
    """Elements that the iteration over one bucket's matrices needs, small ones in batches."""
    shapes = [
        shape
        for m in bucket.gathered
        if m.owner == groups.tensor.rank
        and (shape := plan.params[int(plan.matrix_param[m.matrix])].matrix) is not None
    ]
    needed = 0
    for batch in group_into_batches(shapes, pad):
        short, longest = min(shapes[batch[0]]), max(max(shapes[i]) for i in batch)
        count = len(batch) if short < BATCH_BELOW else 1
        whole = workspace_numel(count, short, longest)
        needed = max(needed, workspace_numel(1, short, longest), min(whole, BATCH_WORKSPACE))
    return needed
