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
from megatron_lw.errors import ConfigError
from megatron_lw.groups import DomainGroups
from megatron_lw.optimizer.children.base import (
    OwnedState,
    OwnedValue,
    ParamGroup,
    RowsOnly,
    group_ranges,
    state_rows_like,
)
from megatron_lw.optimizer.children.decay import shrink, with_l2
from megatron_lw.optimizer.children.exchange import ExchangeBuffers, RowExchange, TensorExchange
from megatron_lw.optimizer.children.matrix_bucket import (
    Kind,
    MatrixBucket,
    UnitFacts,
    held_units,
    iteration_workspace,
    kinds_of,
    owned_units,
    recorded_here,
    refined_matrices,
    row_parts,
    unit_facts,
    view_of,
)
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import group_into_batches
from megatron_lw.optimizer.children.owned import OwnedMatrices, scratch_numel
from megatron_lw.optimizer.children.schedule import ExchangeSchedule, matrix_pieces, schedule
from megatron_lw.optimizer.children.shared_newton_schulz import SharedNewtonSchulz
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.matrix_view import Shape
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Route
from megatron_lw.optimizer.tp_mode import TpMode

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
        tp_mode: who orthogonalises what tensor parallelism divides.

    Attributes:
        tp_mode: as given.
        lr_ratios: what `ratios` gave at the last step.
        num_orthogonalised: matrices that this rank orthogonalised in the last step, or a shard of.
        workspace_nbytes: bytes allocated besides states.

    Raises:
        ConfigError: the mode is not for a child that keeps states of matrices.
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
        tp_mode: TpMode = "owner",
    ) -> None:
        if self.refines and tp_mode != "owner" and groups.tensor.size > 1:
            raise ConfigError(
                f"muon_tp_mode = {tp_mode!r} under {self.name!r}: its second moment is kept by the "
                "owner of a matrix; use 'owner'"
            )
        self.num_steps = 0
        self.num_orthogonalised = 0
        self._kept = Kept()
        self._newton_schulz = newton_schulz
        self._pad = pad
        self.tp_mode = tp_mode
        middle: list[Part] = [self._gather, self._compute, self._scatter]
        separate = groups.tensor.size > 1
        self._stages: list[list[Part]] = [
            [self._begin],
            *([[part] for part in middle] if separate else [middle]),
            [self._apply],
        ]
        self._routes = {name: routes[name] for m in masters for name in m.bucket.names}
        self._scales: dict[Kind, float] = {}
        self._shapes = {n: (r.group.name, view_of(r).shapes) for n, r in self._routes.items()}
        self._kinds = kinds_of(self._routes.values())
        self.lr_ratios: dict[str, float | tuple[float, ...]] = {}
        self._recorded = recorded_here(plan, self._routes, groups.exchange)
        schedules, facts = [], []
        for master, index in zip(masters, bucket_indices, strict=True):
            pieces = matrix_pieces(plan, master.bucket.layout, index)
            known = unit_facts(plan, pieces, routes, tp_mode, groups.tensor.size)
            homes = {matrix: each.home for matrix, each in known.items()}
            ranks = groups.reduce.rank, groups.tensor.rank
            schedules.append(schedule(plan, pieces, *ranks, homes))
            facts.append(known)
        self._allocate(masters, schedules, facts, groups)
        self._buckets = [
            self._bucket(i, master, schedules[i], facts[i], plan, groups)
            for i, master in enumerate(masters)
        ]
        self._allocate_iteration(groups)

    def _allocate(
        self,
        masters: Sequence[MasterRow],
        schedules: Sequence[ExchangeSchedule],
        facts: Sequence[Mapping[int, UnitFacts]],
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
        apart = max(
            (
                scratch_numel(held_units(each, known, groups.tensor))
                for each, known in zip(schedules, facts, strict=True)
            ),
            default=0,
        )
        self._gathered = torch.empty(apart, dtype=dtype, device=device)

    def _allocate_iteration(self, groups: DomainGroups) -> None:
        """Workspace of the iterations, which the matrices decide."""
        device, dtype = self._scratch.device, self._newton_schulz.dtype
        needed = max((iteration_workspace(bucket.batches) for bucket in self._buckets), default=0)
        self._workspace = torch.empty(needed, dtype=dtype, device=device)
        shared = [bucket.shared for bucket in self._buckets]
        self._shared = SharedNewtonSchulz(self._newton_schulz, groups.tensor, shared, device)
        tensors = [*self._rows, self._scratch, self._gathered, self._workspace]
        self.workspace_nbytes = sum(t.nbytes for t in tensors) + self._shared.nbytes
        self.workspace_nbytes += sum(b.nbytes for b in self._buffers)

    def _bucket(
        self,
        position: int,
        master: MasterRow,
        plan_part: ExchangeSchedule,
        facts: Mapping[int, UnitFacts],
        plan: OwnershipPlan,
        groups: DomainGroups,
    ) -> MatrixBucket:
        """Make all views of one bucket, once."""
        slot = position % len(self._rows)
        row = self._rows[slot][: master.row.numel()]
        over = groups.tensor
        shapes = {matrix: known.shape_on(over) for matrix, known in facts.items()}
        boxes = {m: known.view.unit_boxes(known.unit, over.size) for m, known in facts.items()}
        buffers = self._buffers[slot]
        rows = RowExchange(plan_part, groups.reduce, buffers, row)
        tensor = TensorExchange(plan_part, over, buffers, rows.local, shapes, boxes)
        owned = OwnedMatrices(owned_units(tensor, facts, over), self._gathered)
        alone: list[torch.Tensor] = []
        shared: list[torch.Tensor] = []
        for each in owned.matrices:
            if each.in_parts and self.tp_mode == "distributed":
                by_rows = facts[each.matrix].view.tp_dim == 0
                shared.append(each.values.mT if by_rows else each.values)
            elif each.values.numel():
                alone.append(each.values)
        batches = group_into_batches([(x.size(0), x.size(1)) for x in alone], self._pad)
        own_shapes = self.own_shapes if self.refines else None
        return MatrixBucket(
            master=master,
            momentum=state_rows_like([master])[0],
            row=row,
            ranges=group_ranges(master, {n: r.group.name for n, r in self._routes.items()}),
            parts=row_parts(master, self._routes, over, row),
            rows=rows,
            tensor=tensor,
            owned=owned,
            batches=tuple([alone[i] for i in batch] for batch in batches),
            shared=tuple(shared),
            refined=refined_matrices(
                owned, facts, plan, self._routes, own_shapes, master.row.device
            ),
        )

    @property
    def num_buckets(self) -> int:
        """See `Child.num_buckets`."""
        return len(self._buckets)

    @torch.no_grad()
    def step(self, groups: Mapping[str, ParamGroup]) -> None:
        """See `Child.step`.

        Collective: for each bucket with cut matrices two all-to-alls over the reduce group, and
        with tensor parallelism two over the tensor-parallel group, or the all-reduces of
        `SharedNewtonSchulz`, on every rank in the same order.

        Raises:
            LayerWiseError: a computation failed; after all exchanges of the step, for which the
                other ranks wait.
        """
        self.num_steps += 1
        self.num_orthogonalised = 0
        self._kept = Kept()
        with self._kept.keeping("scales"):
            # From the global shapes, before anything moves; what was recorded steers nothing.
            self._scales = self._present_scales(groups)
        for tick in range(len(self._buckets) + len(self._stages) - 1):
            for delay, parts in enumerate(self._stages):
                if 0 <= tick - delay < len(self._buckets):
                    for part in parts:
                        part(self._buckets[tick - delay], groups)
        self._kept.raise_kept()

    def ratios(self, groups: Mapping[str, ParamGroup]) -> dict[str, float | tuple[float, ...]]:
        """What the learning rate is multiplied with, by the global shapes and present settings.

        Args:
            groups: parameter groups by name, with their current settings.

        Returns:
            Parameter name -> its scale; where a stored matrix is several, one for each, in the
            order of rows.
        """
        scales = self._present_scales(groups)
        found: dict[str, float | tuple[float, ...]] = {}
        for name, (group, shapes) in self._shapes.items():
            each = tuple(scales[group, shape] for shape in shapes)
            found[name] = each if len(each) > 1 else each[0]
        return found

    def record(self, groups: Mapping[str, ParamGroup]) -> None:
        """Set `lr_ratios`. Nothing that was recorded or loaded before is read."""
        self.lr_ratios = self.ratios(groups)

    def owned_values(self) -> Mapping[str, Mapping[str, OwnedValue]]:
        """See `Child.owned_values`: `lr_ratio`, for the record; a load passes it over."""
        return {n: {"lr_ratio": self.lr_ratios[n]} for n in self._recorded if n in self.lr_ratios}

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

    def _present_scales(self, groups: Mapping[str, ParamGroup]) -> dict[Kind, float]:
        return {kind: self.scale(kind[1], groups[kind[0]]) for kind in self._kinds}

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
            bucket.owned.load()
            for matrices in bucket.batches:
                alike = all(x.shape == matrices[0].shape for x in matrices)
                engine = self._newton_schulz
                orthogonalise = engine.orthogonalise if alike else engine.orthogonalise_padded
                orthogonalise(matrices, matrices, self._workspace)
                self.num_orthogonalised += len(matrices)
        self._shared(bucket.shared, lambda: self._guarded(bucket), bucket.label)
        self.num_orthogonalised += len(bucket.shared)
        with self._guarded(bucket):
            for each in bucket.refined:
                self.refine(each.update, each.states, groups[each.group])
            bucket.owned.store()
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
                shrink(part.weights, part.updates, group)
                if part.shape is not None:
                    step = -float(group["lr"]) * self._scales[part.group, part.shape]
                    torch._foreach_add_(part.weights, part.updates, alpha=step)

    def _guarded(self, bucket: MatrixBucket) -> AbstractContextManager[None]:
        """Keep the first failure for the end of the step: other ranks wait for our exchanges."""
        return self._kept.keeping(bucket.label)
