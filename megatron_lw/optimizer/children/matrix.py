"""`MatrixChild`: steps buckets of matrices, each whole matrix at its owner.

Per bucket there are three parts, and the parts of neighbouring buckets interleave so that the
exchange of one runs under the Newton-Schulz iteration of the bucket before:

    begin(b)    momentum in the rows; pieces of cut matrices leave for their owners
    compute(b)  the owner orthogonalises its matrices; updates of cut ones leave for their rows
    apply(b)    weight decay and update in the rows

    order: begin 0 | begin 1, compute 0 | begin 2, compute 1, apply 0 | ...

The update is rounded to the exchange dtype whether or not it travelled, so cutting changes no
number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_lw.distributed.collectives import Handle
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CommunicationError, StateError
from megatron_lw.optimizer.children.base import (
    GroupRange,
    ParamGroup,
    group_ranges,
    state_rows_like,
)
from megatron_lw.optimizer.children.exchange import (
    Exchange,
    ExchangeBuffers,
    ExchangeSchedule,
    ShardBoxes,
    matrix_pieces,
    schedule,
)
from megatron_lw.optimizer.children.newton_schulz import BATCH_BELOW, NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import workspace_numel
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Route

_IN_FLIGHT = 3
_BATCH_WORKSPACE = 1 << 26
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of one matrix in this rank's row.

    Attributes:
        start: first element in the row.
        stop: one past the last.
        group: name of its parameter group.
        shape: rows and columns of the whole (global) matrix.
    """

    start: int
    stop: int
    group: str
    shape: Shape


@dataclass(slots=True)
class MatrixBucket:
    """What the child keeps of one bucket.

    Attributes:
        master: its fp32 row.
        momentum: fp32 row.
        parts: matrices in this row.
        ranges: runs of one parameter group.
        row: workspace row in the exchange dtype: Newton-Schulz inputs, then updates.
        exchange: carries its cut matrices.
        shapes: matrix index -> rows and columns, for the matrices that this rank owns.
        handle: the all-to-all under way.
    """

    master: MasterRow
    momentum: torch.Tensor
    parts: tuple[RowPart, ...]
    ranges: tuple[GroupRange, ...]
    row: torch.Tensor
    exchange: Exchange
    shapes: Mapping[int, Shape]
    handle: Handle = field(default_factory=Handle)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.master.bucket.label


class MatrixChild(ABC):
    """Base of the optimizers that orthogonalise whole matrices.

    Args:
        masters: rows of its buckets, in the order in which they are stepped.
        bucket_indices: index of each of them in the plan.
        routes: parameter name -> its route: parameter group and matrix view.
        plan: owners and pieces.
        group: the exchange group.
        newton_schulz: the iteration; its dtype is the exchange dtype.
    """

    name = "matrix"
    state_keys: tuple[str, ...] = ("momentum",)

    def __init__(
        self,
        masters: Sequence[MasterRow],
        bucket_indices: Sequence[int],
        routes: Mapping[str, Route],
        plan: OwnershipPlan,
        group: Group,
        newton_schulz: NewtonSchulz,
    ) -> None:
        self.num_steps = 0
        self.num_orthogonalised = 0
        self._failure: StateError | None = None
        self._newton_schulz = newton_schulz
        schedules = [
            schedule(plan, master.bucket.layout, index, group.rank)
            for master, index in zip(masters, bucket_indices, strict=True)
        ]
        rows, buffers = self._allocate(plan, masters, schedules)
        momenta = state_rows_like(masters)
        group_of = {name: route.group.name for name, route in routes.items()}
        self._buckets = [
            MatrixBucket(
                master=master,
                momentum=momenta[i],
                parts=_row_parts(plan, master, index, group_of),
                ranges=group_ranges(master, group_of),
                row=rows[i % _IN_FLIGHT][: master.row.numel()],
                exchange=_exchange(plan, schedules[i], group, buffers[i % _IN_FLIGHT], routes),
                shapes={m.matrix: _shape(plan, m.matrix) for m in schedules[i].owned},
            )
            for i, (master, index) in enumerate(zip(masters, bucket_indices, strict=True))
        ]

    def _allocate(
        self,
        plan: OwnershipPlan,
        masters: Sequence[MasterRow],
        schedules: Sequence[ExchangeSchedule],
    ) -> tuple[list[torch.Tensor], list[ExchangeBuffers]]:
        """Workspace for the buckets in flight, allocated once."""
        slots = min(_IN_FLIGHT, len(masters))
        longest = max((m.row.numel() for m in masters), default=0)
        device = masters[0].row.device if masters else torch.device("cpu")
        dtype = self._newton_schulz.dtype
        rows = [torch.zeros(longest, dtype=dtype, device=device) for _ in range(slots)]
        buffers = [ExchangeBuffers(schedules, dtype, device) for _ in range(slots)]
        self._scratch = torch.zeros(longest, dtype=torch.float32, device=device)
        needed = max((_iteration_workspace(plan, s) for s in schedules), default=0)
        self._workspace = torch.empty(needed, dtype=dtype, device=device)
        tensors = [*rows, self._scratch, self._workspace]
        self.workspace_nbytes = sum(t.numel() * t.element_size() for t in tensors)
        self.workspace_nbytes += sum(b.nbytes for b in buffers)
        return rows, buffers

    @property
    def num_buckets(self) -> int:
        """See `Child.num_buckets`."""
        return len(self._buckets)

    @torch.no_grad()
    def step(self, groups: Mapping[str, ParamGroup]) -> None:
        """See `Child.step`.

        Collective: two all-to-alls over the exchange group for each bucket with cut matrices, on
        every rank in the same order.
        """
        self.num_steps += 1
        self.num_orthogonalised = 0
        self._failure = None
        buckets = self._buckets
        for i in range(len(buckets) + 2):
            if i < len(buckets):
                self._begin(buckets[i], groups)
            if 0 <= i - 1 < len(buckets):
                self._compute(buckets[i - 1])
            if 0 <= i - 2 < len(buckets):
                self._apply(buckets[i - 2], groups)
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _guarded(self, bucket: MatrixBucket) -> Iterator[None]:
        """Keep the first failure for the end of the step: other ranks wait for our exchanges."""
        try:
            yield
        except CommunicationError:
            raise
        except Exception as error:
            failure = StateError(f"{bucket.label}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._failure = self._failure or failure

    def state_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """See `Child.state_rows`."""
        return {"momentum": self._buckets[bucket].momentum}

    @abstractmethod
    def update_momentum(
        self, momentum: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, group: ParamGroup
    ) -> None:
        """Advance the momentum in place and write what is to be orthogonalised.

        Args:
            momentum: fp32 run of a row, updated.
            grad: fp32, same length, not written.
            out: same length, exchange dtype.
            group: settings of the parameters in the run.
        """

    @abstractmethod
    def scale(self, shape: Shape, group: ParamGroup) -> float:
        """What the orthogonalised matrix is multiplied with besides the learning rate.

        Args:
            shape: rows and columns of the whole matrix, without padding.
            group: current settings.
        """

    def _begin(self, bucket: MatrixBucket, groups: Mapping[str, ParamGroup]) -> None:
        with self._guarded(bucket):
            grads = bucket.master.gradient()
            for part in bucket.ranges:
                run = slice(part.start, part.stop)
                self.update_momentum(
                    bucket.momentum[run], grads[run], bucket.row[run], groups[part.group]
                )
        bucket.handle = bucket.exchange.start_out(bucket.row, label=bucket.label)

    def _compute(self, bucket: MatrixBucket) -> None:
        bucket.handle.wait()
        with self._guarded(bucket):
            bucket.exchange.assemble(bucket.row)
            for matrices in self._owned_by_shape(bucket).values():
                self._newton_schulz.orthogonalise(matrices, matrices, self._workspace)
                self.num_orthogonalised += len(matrices)
        bucket.handle = bucket.exchange.start_back(bucket.row, label=bucket.label)

    def _owned_by_shape(self, bucket: MatrixBucket) -> dict[Shape, list[torch.Tensor]]:
        """What this rank orthogonalises: `[rows, cols]` in the exchange dtype, by shape."""
        by_shape: dict[Shape, list[torch.Tensor]] = {}
        for matrix in bucket.exchange.schedule.owned:
            shape = bucket.shapes[matrix.matrix]
            if matrix.in_place:
                whole = bucket.row[matrix.start : matrix.start + matrix.numel].view(shape)
            else:
                whole = bucket.exchange.matrices[matrix.matrix]
            by_shape.setdefault(shape, []).append(whole)
        return by_shape

    def _apply(self, bucket: MatrixBucket, groups: Mapping[str, ParamGroup]) -> None:
        bucket.handle.wait()
        with self._guarded(bucket):
            bucket.exchange.disassemble(bucket.row)
            master = bucket.master.row
            for part in bucket.parts:
                group = groups[part.group]
                lr, decay = float(group["lr"]), float(group["weight_decay"])
                weights = master[part.start : part.stop]
                weights.mul_(1.0 - lr * decay)
                scale = self.scale(part.shape, group)
                weights.add_(bucket.row[part.start : part.stop], alpha=-lr * scale)


def _exchange(
    plan: OwnershipPlan,
    bucket: ExchangeSchedule,
    group: Group,
    buffers: ExchangeBuffers,
    routes: Mapping[str, Route],
) -> Exchange:
    shapes: dict[int, Shape] = {}
    boxes: dict[int, ShardBoxes] = {}
    for owned in bucket.owned:
        shapes[owned.matrix] = _shape(plan, owned.matrix)
        view = routes[plan.params[int(plan.matrix_param[owned.matrix])].name].matrix
        if view is not None and owned.shards > 1:
            boxes[owned.matrix] = view.shard_boxes(owned.shards)
    return Exchange(bucket, group, buffers, shapes, boxes)


def _iteration_workspace(plan: OwnershipPlan, bucket: ExchangeSchedule) -> int:
    """Elements that the iteration over one bucket's matrices needs, small ones in batches."""
    counts = Counter(_shape(plan, owned.matrix) for owned in bucket.owned)
    needed = 0
    for shape, count in counts.items():
        batch = count if min(shape) < BATCH_BELOW else 1
        single = workspace_numel(1, *shape)
        needed = max(needed, single, min(workspace_numel(batch, *shape), _BATCH_WORKSPACE))
    return needed


def _row_parts(
    plan: OwnershipPlan, master: MasterRow, index: int, group_of: Mapping[str, str]
) -> tuple[RowPart, ...]:
    layout, row = master.bucket.layout, master.bucket.group.rank
    return tuple(
        RowPart(
            piece.row_start,
            piece.row_start + piece.numel,
            group_of[plan.params[int(plan.matrix_param[matrix])].name],
            _shape(plan, matrix),
        )
        for matrix, pieces in matrix_pieces(plan, layout, index).items()
        for piece in pieces
        if piece.row == row
    )


def _shape(plan: OwnershipPlan, matrix: int) -> Shape:
    shape = plan.params[int(np.asarray(plan.matrix_param)[matrix])].matrix
    if shape is None:
        raise TypeError(f"matrix {matrix} of the plan has no shape")
    return shape
