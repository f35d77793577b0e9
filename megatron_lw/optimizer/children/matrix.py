"""`MatrixChild`: steps buckets of matrices, each whole matrix at its owner.

A bucket passes through five parts, and the parts of neighbouring buckets interleave so that the
exchange of one runs under the Newton-Schulz iteration of the bucket before:

    begin      momentum in the rows; pieces of cut matrices leave for their owners' rows
    gather     pieces are put together; tensor-parallel shards leave for the owners
    compute    the owner orthogonalises its matrices; updates leave for the other shards
    scatter    updates of cut matrices leave for their rows
    apply      weight decay and update in the rows

    order: begin 0 | begin 1, gather 0 | begin 2, gather 1, compute 0 | ...

Without tensor parallelism gather, compute and scatter are one part. The update is rounded to the
exchange dtype whether or not it travelled, so cutting changes no number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_lw.distributed.agreement import Kept
from megatron_lw.errors import StateError
from megatron_lw.groups import DomainGroups
from megatron_lw.optimizer.children.base import (
    OwnedState,
    ParamGroup,
    RowsOnly,
    group_ranges,
    state_rows_like,
)
from megatron_lw.optimizer.children.decay import shrink, with_l2
from megatron_lw.optimizer.children.exchange import (
    ExchangeBuffers,
    RowExchange,
    Shape,
    ShardBoxes,
    TensorExchange,
)
from megatron_lw.optimizer.children.matrix_bucket import (
    MatrixBucket,
    RefinedMatrix,
    iteration_workspace,
    row_parts,
)
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import group_into_batches
from megatron_lw.optimizer.children.place import place_of
from megatron_lw.optimizer.children.schedule import (
    ExchangeSchedule,
    Piece,
    matrix_pieces,
    schedule,
)
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Route

Part = Callable[[MatrixBucket, Mapping[str, ParamGroup]], None]


class MatrixChild(RowsOnly, ABC):
    """Base of the optimizers that orthogonalise whole matrices.

    Args:
        masters: rows of its buckets, in the order in which they are stepped.
        bucket_indices: index of each of them in the plan.
        routes: parameter name -> its route: parameter group and matrix view.
        plan: owners and pieces.
        groups: of the plan's domain: pieces travel over `reduce`, shards over `tensor`.
        newton_schulz: the iteration; its input dtype is the exchange dtype.
        pad: whether small matrices of one short side share a batch, see `group_into_batches`.

    Attributes:
        num_orthogonalised: matrices that this rank orthogonalised in the last step.
        workspace_nbytes: bytes allocated besides states.
    """

    name = "matrix"
    state_keys: tuple[str, ...] = ("momentum",)
    refines = False
    """Whether `refine` does something to what has been orthogonalised."""

    def __init__(
        self,
        masters: Sequence[MasterRow],
        bucket_indices: Sequence[int],
        routes: Mapping[str, Route],
        plan: OwnershipPlan,
        groups: DomainGroups,
        newton_schulz: NewtonSchulz,
        *,
        pad: bool = False,
    ) -> None:
        self.num_steps = 0
        self.num_orthogonalised = 0
        self._kept = Kept()
        self._newton_schulz = newton_schulz
        self._pad = pad
        middle: list[Part] = [self._gather, self._compute, self._scatter]
        separate = groups.tensor.size > 1
        self._stages: list[list[Part]] = [
            [self._begin],
            *([[part] for part in middle] if separate else [middle]),
            [self._apply],
        ]
        places = [
            matrix_pieces(plan, master.bucket.layout, index)
            for master, index in zip(masters, bucket_indices, strict=True)
        ]
        schedules = [schedule(plan, p, groups.reduce.rank, groups.tensor.rank) for p in places]
        self._allocate(plan, masters, schedules, groups)
        self._buckets = [
            self._bucket(i, master, places[i], schedules[i], plan, routes, groups)
            for i, master in enumerate(masters)
        ]

    def _allocate(
        self,
        plan: OwnershipPlan,
        masters: Sequence[MasterRow],
        schedules: Sequence[ExchangeSchedule],
        groups: DomainGroups,
    ) -> None:
        """Workspace for the buckets in flight, allocated once."""
        in_flight = min(len(self._stages), len(masters))
        longest = max((m.row.numel() for m in masters), default=0)
        device = masters[0].row.device if masters else torch.device("cpu")
        dtype = self._newton_schulz.input_dtype
        self._rows = [torch.zeros(longest, dtype=dtype, device=device) for _ in range(in_flight)]
        self._buffers = [
            ExchangeBuffers(schedules, groups.tensor, dtype, device) for _ in range(in_flight)
        ]
        self._scratch = torch.zeros(longest, dtype=torch.float32, device=device)
        needed = max(
            (iteration_workspace(plan, s, groups, self._pad) for s in schedules), default=0
        )
        self._workspace = torch.empty(needed, dtype=self._newton_schulz.dtype, device=device)
        tensors = [*self._rows, self._scratch, self._workspace]
        self.workspace_nbytes = sum(t.nbytes for t in tensors)
        self.workspace_nbytes += sum(b.nbytes for b in self._buffers)

    def _bucket(
        self,
        position: int,
        master: MasterRow,
        pieces: Mapping[int, Sequence[Piece]],
        plan_part: ExchangeSchedule,
        plan: OwnershipPlan,
        routes: Mapping[str, Route],
        groups: DomainGroups,
    ) -> MatrixBucket:
        """Make all views of one bucket, once."""
        slot = position % len(self._rows)
        row = self._rows[slot][: master.row.numel()]
        shapes: dict[int, Shape] = {}
        boxes: dict[int, ShardBoxes] = {}
        of_group: dict[int, str] = {}
        for matrix in pieces:
            route = routes[plan.params[int(plan.matrix_param[matrix])].name]
            view = route.matrix
            if view is None:
                raise StateError(f"parameter {route.info.name!r} is in a bucket of matrices")
            shapes[matrix] = (view.rows, view.cols)
            boxes[matrix] = view.shard_boxes(groups.tensor.size)
            of_group[matrix] = route.group.name
        buffers = self._buffers[slot]
        rows = RowExchange(plan_part, groups.reduce, buffers, row)
        tensor = TensorExchange(plan_part, groups.tensor, buffers, rows.local, shapes, boxes)
        wholes = list(tensor.matrices.values())
        batches = group_into_batches([shapes[m] for m in tensor.matrices], self._pad)
        mine = [p for found in pieces.values() for p in found if p.row == groups.reduce.rank]
        return MatrixBucket(
            master=master,
            momentum=state_rows_like([master])[0],
            row=row,
            ranges=group_ranges(master, {name: r.group.name for name, r in routes.items()}),
            parts=row_parts(mine, shapes, of_group, master.row, row),
            rows=rows,
            tensor=tensor,
            owned=tuple([wholes[i] for i in batch] for batch in batches),
            refined=self._refined(plan, tensor.matrices, routes),
        )

    @property
    def num_buckets(self) -> int:
        """See `Child.num_buckets`."""
        return len(self._buckets)

    @torch.no_grad()
    def step(self, groups: Mapping[str, ParamGroup]) -> None:
        """See `Child.step`.

        Collective: for each bucket with cut matrices two all-to-alls over the reduce group, and
        with tensor parallelism two over the tensor-parallel group, on every rank in the same order.

        Raises:
            LayerWiseError: a computation failed; after all exchanges of the step, for which the
                other ranks wait.
        """
        self.num_steps += 1
        self.num_orthogonalised = 0
        self._kept = Kept()
        for tick in range(len(self._buckets) + len(self._stages) - 1):
            for delay, parts in enumerate(self._stages):
                if 0 <= tick - delay < len(self._buckets):
                    for part in parts:
                        part(self._buckets[tick - delay], groups)
        self._kept.raise_kept()

    def state_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """See `Child.state_rows`."""
        return {"momentum": self._buckets[bucket].momentum}

    def owned_states(self) -> Sequence[OwnedState]:
        """See `Child.owned_states`: what `own_shapes` asks for."""
        return [
            each.place.state(key, tensor)
            for bucket in self._buckets
            for each in bucket.refined
            for key, tensor in each.states.items()
        ]

    def own_shapes(self, shape: Shape) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the fp32 states that the owner of a matrix keeps, by state key.

        Args:
            shape: rows and columns of the whole matrix.
        """
        return {}

    def refine(
        self, update: torch.Tensor, states: Mapping[str, torch.Tensor], group: ParamGroup
    ) -> None:
        """Change an orthogonalised matrix in place, at its owner; called where `refines` is set.

        Args:
            update: [rows, columns], in the exchange dtype.
            states: those of `own_shapes`, advanced.
            group: settings of its parameter.
        """

    def _refined(
        self,
        plan: OwnershipPlan,
        matrices: Mapping[int, torch.Tensor],
        routes: Mapping[str, Route],
    ) -> tuple[RefinedMatrix, ...]:
        """What this rank refines, with states of zeros."""
        found = []
        for matrix, update in matrices.items() if self.refines else ():
            route = routes[plan.params[int(plan.matrix_param[matrix])].name]
            local = int(plan.matrix_start[matrix] // plan.matrix_numel[matrix])
            shapes = self.own_shapes((update.size(0), update.size(1)))
            states = {key: self._scratch.new_zeros(shape) for key, shape in shapes.items()}
            place = place_of(route, local)
            found.append(RefinedMatrix(place, route.group.name, update, states))
        return tuple(found)

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
            grads, weights = bucket.master.gradient(), bucket.master.row
            for part in bucket.ranges:
                run, group = slice(part.start, part.stop), groups[part.group]
                [grad] = with_l2([grads[run]], [weights[run]], group)
                self.update_momentum(bucket.momentum[run], grad, bucket.row[run], group)
            bucket.rows.pack_out()
        bucket.handle = bucket.rows.start_out(bucket.label)

    def _gather(self, bucket: MatrixBucket, groups: Mapping[str, ParamGroup]) -> None:
        bucket.handle.wait()
        with self._guarded(bucket):
            bucket.rows.finish_out()
            bucket.tensor.pack_out()
        bucket.handle = bucket.tensor.start_out(bucket.label)

    def _compute(self, bucket: MatrixBucket, groups: Mapping[str, ParamGroup]) -> None:
        bucket.handle.wait()
        with self._guarded(bucket):
            bucket.tensor.finish_out()
            for matrices in bucket.owned:
                alike = all(x.shape == matrices[0].shape for x in matrices)
                engine = self._newton_schulz
                orthogonalise = engine.orthogonalise if alike else engine.orthogonalise_padded
                orthogonalise(matrices, matrices, self._workspace)
                self.num_orthogonalised += len(matrices)
            for each in bucket.refined:
                self.refine(each.update, each.states, groups[each.group])
            bucket.tensor.pack_back()
        bucket.handle = bucket.tensor.start_back(bucket.label)

    def _scatter(self, bucket: MatrixBucket, groups: Mapping[str, ParamGroup]) -> None:
        bucket.handle.wait()
        with self._guarded(bucket):
            bucket.tensor.finish_back()
            bucket.rows.pack_back()
        bucket.handle = bucket.rows.start_back(bucket.label)

    def _apply(self, bucket: MatrixBucket, groups: Mapping[str, ParamGroup]) -> None:
        bucket.handle.wait()
        with self._guarded(bucket):
            bucket.rows.finish_back()
            for part in bucket.parts:
                group = groups[part.group]
                step = -float(group["lr"]) * self.scale(part.shape, group)
                shrink(part.weights, part.updates, group)
                torch._foreach_add_(part.weights, part.updates, alpha=step)

    def _guarded(self, bucket: MatrixBucket) -> AbstractContextManager[None]:
        """Keep the first failure for the end of the step: other ranks wait for our exchanges."""
        return self._kept.keeping(bucket.label)
