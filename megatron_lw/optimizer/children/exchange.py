"""The exchange at run time: two all-to-alls between rows, and two between tensor-parallel ranks.

All views are made once; a step packs, sends and unpacks them in one fused copy each. Both ends of a
pair of ranks list the runs between them in the same order (by matrix, then by place), so a buffer
needs no header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_lw.distributed.collectives import Handle, all_to_all
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.boxes import Box, BoxPair
from megatron_lw.optimizer.children.schedule import ExchangeSchedule, Piece, RowMatrix
from megatron_lw.optimizer.matrix_view import Shape

ShardBoxes = tuple[tuple[BoxPair, ...], ...]


class Run(NamedTuple):
    """A run of elements that goes to, or comes from, one rank.

    Attributes:
        rank: the other rank, in the group.
        order: its place among the runs of that rank.
        place: where the elements are, or belong.
    """

    rank: int
    order: tuple[int, int]
    place: torch.Tensor


class Wire:
    """A buffer that carries runs, ordered by rank.

    Args:
        buffer: at least as long as all runs together.
        runs: what it carries.
        ranks: size of the group.
    """

    def __init__(self, buffer: torch.Tensor, runs: Iterable[Run], ranks: int) -> None:
        ordered = sorted(runs, key=lambda run: (run.rank, run.order))
        self.splits = [0] * ranks
        for run in ordered:
            self.splits[run.rank] += run.place.numel()
        self.buffer = buffer[: sum(self.splits)]
        self._places = [run.place for run in ordered]
        self._parts = list(self.buffer.split([p.numel() for p in self._places]))

    def pack(self) -> None:
        """Copy the elements from their places into the buffer."""
        copy_all(self._parts, self._places)

    def unpack(self) -> None:
        """Copy the elements from the buffer to their places."""
        copy_all(self._places, self._parts)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, in one fused call."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


class ExchangeBuffers:
    """Workspace for the exchange of one bucket at a time, large enough for any of `schedules`.

    Attributes:
        assembly: local parts of matrices that are put together in this row.
        shards: whole matrices that this rank owns, shard after shard.
        whole: the same in their global order, where that differs.
        outer, inner: what leaves a rank and what reaches it, in turn; used by both stages.
    """

    def __init__(
        self,
        schedules: Sequence[ExchangeSchedule],
        tensor: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def longest(size: Callable[[ExchangeSchedule], int]) -> torch.Tensor:
            numel = max(map(size, schedules), default=0)
            return torch.empty(numel, dtype=dtype, device=device)

        def owned(plan: ExchangeSchedule) -> int:
            return sum(m.numel * tensor.size for m in plan.gathered if _is_put_together(m, tensor))

        def through_tensor(plan: ExchangeSchedule) -> int:
            return sum(m.numel for m in plan.gathered) * (tensor.size - 1) if tensor.size > 1 else 0

        def at_row(plan: ExchangeSchedule) -> int:
            return max(sum(t.piece.numel for t in plan.leaving), through_tensor(plan))

        def at_owner(plan: ExchangeSchedule) -> int:
            return max(sum(t.piece.numel for t in plan.arriving), through_tensor(plan))

        self.assembly = longest(lambda plan: plan.assembly_numel)
        self.shards = longest(owned)
        self.whole = longest(owned)
        self.outer = longest(at_row)
        self.inner = longest(at_owner)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        buffers = (self.assembly, self.shards, self.whole, self.outer, self.inner)
        return sum(buffer.nbytes for buffer in buffers)


class RowExchange:
    """Between rows, over data parallelism: pieces to the owner's row, updates back.

    Args:
        plan: what moves.
        group: the reduce group; rank r of it has row r.
        buffers: workspace.
        row: this rank's row of inputs, later of updates, in the exchange dtype.

    Attributes:
        local: matrix index -> the flat local part of a matrix that is put together in this row.
    """

    def __init__(
        self, plan: ExchangeSchedule, group: Group, buffers: ExchangeBuffers, row: torch.Tensor
    ) -> None:
        self._group = group
        self._active = plan.active
        self.local: dict[int, torch.Tensor] = {}
        for m in plan.gathered:
            source = row if m.in_place else buffers.assembly
            self.local[m.matrix] = source[m.start : m.start + m.numel]

        def in_row(piece: Piece) -> torch.Tensor:
            return row[piece.row_start : piece.row_start + piece.numel]

        def in_local(piece: Piece) -> torch.Tensor:
            return self.local[piece.matrix][piece.start : piece.start + piece.numel]

        self._kept_in_row = [in_row(piece) for piece in plan.kept]
        self._kept_in_local = [in_local(piece) for piece in plan.kept]
        leaving = [
            (t, Run(t.owner_row, (t.piece.matrix, t.piece.start), in_row(t.piece)))
            for t in plan.leaving
        ]
        arriving = [
            (t, Run(t.piece.row, (t.piece.matrix, t.piece.start), in_local(t.piece)))
            for t in plan.arriving
        ]
        rows = plan.rows
        self._sent = Wire(buffers.outer, [run for t, run in leaving if t.goes_out], rows)
        self._received = Wire(buffers.inner, [run for t, run in arriving if t.goes_out], rows)
        self._returned = Wire(buffers.inner, [run for _, run in arriving], rows)
        self._landed = Wire(buffers.outer, [run for _, run in leaving], rows)

    def pack_out(self) -> None:
        """Put what `start_out` sends into the buffer."""
        if self._active:
            self._sent.pack()

    def start_out(self, label: str) -> Handle:
        """Send this row's pieces, as packed, to their owners' rows.

        Collective: all-to-all over the reduce group, on every rank, if the bucket is active;
        returns before it is done.
        """
        if not self._active:
            return Handle()
        return _swap(self._received, self._sent, self._group, f"exchange, {label}")

    def finish_out(self) -> None:
        """Put received and own pieces together in `local`."""
        self._received.unpack()
        copy_all(self._kept_in_local, self._kept_in_row)

    def pack_back(self) -> None:
        """Put what `start_back` sends into the buffer; this row's own pieces are there at once."""
        if self._active:
            copy_all(self._kept_in_row, self._kept_in_local)
            self._returned.pack()

    def start_back(self, label: str) -> Handle:
        """Send the updates in `local`, as packed, back to the rows.

        Collective: as `start_out`.
        """
        if not self._active:
            return Handle()
        return _swap(self._landed, self._returned, self._group, f"return of updates, {label}")

    def finish_back(self) -> None:
        """Put the updates that came back into this rank's row."""
        self._landed.unpack()


class TensorExchange:
    """Inside a row, over tensor parallelism: shards to the owner, updates back.

    Args:
        plan: what is put together in this row.
        group: the tensor-parallel group.
        buffers: workspace.
        local: matrix index -> flat local part, see `RowExchange.local`.
        shapes: matrix index -> rows and columns of the whole matrix; of the shard where it stays.
        boxes: matrix index -> where each shard lies in it, for divided matrices.

    Attributes:
        matrices: matrix index -> `[rows, columns]` of the matrices that this rank orthogonalises,
            whole or, where they stay in parts, its shard; what is written there is what
            `start_back` sends.
    """

    def __init__(
        self,
        plan: ExchangeSchedule,
        group: Group,
        buffers: ExchangeBuffers,
        local: Mapping[int, torch.Tensor],
        shapes: Mapping[int, Shape],
        boxes: Mapping[int, ShardBoxes],
    ) -> None:
        self._group = group
        self._active = plan.crosses_tensor
        self._local = local
        self.matrices: dict[int, torch.Tensor] = {}
        self._ordering: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._own_shards: list[tuple[torch.Tensor, torch.Tensor]] = []
        out_sent: list[Run] = []
        out_received: list[Run] = []
        back_returned: list[Run] = []
        back_landed: list[Run] = []
        cursor = 0
        for m in plan.gathered:
            order = (m.matrix, 0)
            if m.home == "every":
                out_sent += [Run(t, order, local[m.matrix]) for t in _others(group)]
            elif m.home == "owner" and m.owner != group.rank:
                run = Run(m.owner, order, local[m.matrix])
                out_sent += [run] if m.divided else []
                back_landed.append(run)
                continue
            if not _is_put_together(m, group):
                self.matrices[m.matrix] = local[m.matrix].view(shapes[m.matrix])
                others = _others(group) if m.home == "owner" else []
                back_returned += [Run(t, order, local[m.matrix]) for t in others]
                continue
            span = slice(cursor, cursor + m.numel * group.size)
            cursor = span.stop
            shards = buffers.shards[span].chunk(group.size)
            self._own_shards.append((shards[group.rank], local[m.matrix]))
            runs = [Run(t, order, shards[t]) for t in _others(group)]
            out_received += runs
            back_returned += runs if m.home == "owner" else []
            self._order(m, buffers.shards[span], buffers.whole[span], shapes, boxes)
        self._sent = Wire(buffers.outer, out_sent, group.size)
        self._received = Wire(buffers.inner, out_received, group.size)
        self._returned = Wire(buffers.inner, back_returned, group.size)
        self._landed = Wire(buffers.outer, back_landed, group.size)

    def pack_out(self) -> None:
        """Put what `start_out` sends into the buffer."""
        if self._active:
            self._sent.pack()

    def start_out(self, label: str) -> Handle:
        """Send this rank's shards, as packed, to where they are put together.

        Collective: all-to-all over the tensor-parallel group, on every rank, if a matrix of the
        bucket is put together; returns before it is done.
        """
        if not self._active:
            return Handle()
        return _swap(self._received, self._sent, self._group, f"exchange of shards, {label}")

    def finish_out(self) -> None:
        """Put the shards together in `matrices`."""
        self._received.unpack()
        copy_all(*_columns(self._own_shards))
        copy_all(*_columns(self._ordering))

    def pack_back(self) -> None:
        """Put what `start_back` sends into the buffer, and this rank's shards into `local`."""
        if not self._active:
            return
        wholes, shards = _columns(self._ordering)
        copy_all(shards, wholes)
        own_shards, local = _columns(self._own_shards)
        copy_all(local, own_shards)
        self._returned.pack()

    def start_back(self, label: str) -> Handle:
        """Send the updates in `matrices`, as packed, to the other tensor-parallel ranks.

        Collective: as `start_out`.
        """
        if not self._active:
            return Handle()
        return _swap(self._landed, self._returned, self._group, f"return of shards, {label}")

    def finish_back(self) -> None:
        """Put the updates that came back into the local parts."""
        self._landed.unpack()

    def _order(
        self,
        m: RowMatrix,
        shards: torch.Tensor,
        whole: torch.Tensor,
        shapes: Mapping[int, Shape],
        boxes: Mapping[int, ShardBoxes],
    ) -> None:
        """Note the copies that turn shards into the matrix; none where shards are runs of rows."""
        shape = shapes[m.matrix]
        if all(len(p) == 1 and p[0].world.shape[1] == shape[1] for p in boxes[m.matrix]):
            self.matrices[m.matrix] = shards.view(shape)
            return
        self.matrices[m.matrix] = whole.view(shape)
        for shard, pairs in zip(shards.chunk(self._group.size), boxes[m.matrix], strict=True):
            rows = max(p.local.start[0] + p.local.shape[0] for p in pairs)
            for pair in pairs:
                target = _box(self.matrices[m.matrix], pair.world)
                self._ordering.append((target, _box(shard.view(rows, -1), pair.local)))


def _is_put_together(m: RowMatrix, tensor: Group) -> bool:
    here = m.home == "every" or (m.home == "owner" and m.owner == tensor.rank)
    return here and m.divided and tensor.size > 1


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _columns(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    (row, col), (rows, cols) = box.start, box.shape
    return tensor[row : row + rows, col : col + cols]


def _swap(incoming: Wire, outgoing: Wire, group: Group, label: str) -> Handle:
    return all_to_all(
        incoming.buffer,
        outgoing.buffer,
        incoming.splits,
        outgoing.splits,
        group,
        async_op=True,
        label=label,
    )
