"""`WholeChild`: any optimizer of torch's kind, stepping whole matrices at their owners.

For each bucket gradient and masters of cut and tensor-parallel matrices travel to the owners, in
fp32; each owner steps an optimizer of its own for each of its matrices; the new masters travel
back, so what the optimizer wrote is what the masters hold, bit by bit. State of whatever shape
lives at the owner and is named for checkpoints; a matrix that gets another owner takes it along.

    take     copies of gradients and masters leave for the owners
    step     the owner's optimizers
    return   new masters leave for their rows
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_lw.distributed.agreement import Kept
from megatron_lw.errors import StateError
from megatron_lw.groups import DomainGroups
from megatron_lw.optimizer.children.base import OwnedState, OwnedValue, ParamGroup
from megatron_lw.optimizer.children.exchange import (
    ExchangeBuffers,
    RowExchange,
    ShardBoxes,
    TensorExchange,
)
from megatron_lw.optimizer.children.place import Place, place_of
from megatron_lw.optimizer.children.schedule import ExchangeSchedule, matrix_pieces, schedule
from megatron_lw.optimizer.children.whole_optimizers import WholeFactory
from megatron_lw.optimizer.children.whole_state import WholeState
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.matrix_view import Shape
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Route

_PROBE_LR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMatrix:
    """One matrix that this rank owns.

    Attributes:
        route: of its parameter.
        place: which matrix of it.
        param: a view of where the masters are put together.
        grad: where the gradient is put together.
        state: its optimizer.
    """

    route: Route
    place: Place
    param: torch.nn.Parameter
    grad: torch.Tensor
    state: WholeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The exchange of one kind of row, gradients or masters.

    Attributes:
        row: fp32 workspace.
        rows: between rows.
        tensor: between tensor-parallel ranks.
    """

    row: torch.Tensor
    rows: RowExchange
    tensor: TensorExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBucket:
    """What the child keeps of one bucket."""

    master: MasterRow
    grads: Way
    weights: Way
    owned: tuple[WholeMatrix, ...]


class WholeChild:
    """Steps its buckets with optimizers of torch's kind.

    Args:
        name: what routing calls it.
        masters: rows of its buckets, in the order in which they are stepped.
        bucket_indices: index of each of them in the plan.
        routes: parameter name -> its route.
        plan: owners and pieces.
        groups: of the plan's domain: pieces travel over `reduce`, shards over `tensor`.
        factory: makes the optimizers.

    Attributes:
        num_stepped: matrices that this rank stepped in the last step.
        workspace_nbytes: bytes allocated besides states.

    Raises:
        ConfigError: the class does not take the settings.
    """

    state_keys: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        masters: Sequence[MasterRow],
        bucket_indices: Sequence[int],
        routes: Mapping[str, Route],
        plan: OwnershipPlan,
        groups: DomainGroups,
        factory: WholeFactory,
    ) -> None:
        self.name = name
        self.num_steps = 0
        self.num_stepped = 0
        self._kept = Kept()
        self._factory = factory
        self._plan, self._routes, self._groups = plan, routes, groups
        places = [
            matrix_pieces(plan, master.bucket.layout, index)
            for master, index in zip(masters, bucket_indices, strict=True)
        ]
        schedules = [
            schedule(plan, p, groups.reduce.rank, groups.tensor.rank, dict.fromkeys(p, "owner"))
            for p in places
        ]
        longest = max((m.row.numel() for m in masters), default=0)
        device = masters[0].row.device if masters else torch.device("cpu")
        self._workspace = [torch.zeros(longest, device=device) for _ in range(2)]
        self._buffers = [
            ExchangeBuffers(schedules, groups.tensor, torch.float32, device) for _ in range(2)
        ]
        self.workspace_nbytes = sum(t.nbytes for t in self._workspace)
        self.workspace_nbytes += sum(b.nbytes for b in self._buffers)
        self._buckets = [
            self._bucket(master, list(pieces), part)
            for master, pieces, part in zip(masters, places, schedules, strict=True)
        ]

    @property
    def num_buckets(self) -> int:
        """See `Child.num_buckets`."""
        return len(self._buckets)

    @torch.no_grad()
    def step(self, groups: Mapping[str, ParamGroup]) -> None:
        """See `Child.step`.

        Collective: for each bucket with cut matrices three all-to-alls over the reduce group, and
        with tensor parallelism three over the tensor-parallel group, on every rank in the same
        order.

        Raises:
            LayerWiseError: an optimizer failed; after all exchanges of the step.
        """
        first = self.num_steps == 0
        self.num_steps += 1
        self.num_stepped = 0
        self._kept = Kept()
        for bucket in self._buckets:
            label = bucket.master.bucket.label
            self._take(bucket, label)
            with self._kept.keeping(label):
                for matrix in bucket.owned:
                    self._advance(matrix, groups[matrix.route.group.name], first)
            self._return(bucket, label)
        self._kept.raise_kept()

    def state_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """See `Child.state_rows`: none."""
        return {}

    def owned_states(self) -> Sequence[OwnedState]:
        """See `Child.owned_states`.

        An optimizer makes its state in its first step. Before it, a step is taken on a copy with a
        gradient of zeros, and what that made is returned, so that a load has where to write.
        """
        found: list[OwnedState] = []
        for matrix in self._matrices():
            self._draft(matrix)
            tensors = matrix.state.tensors()
            found += [matrix.place.state(key, tensor) for key, tensor in tensors.items()]
        return found

    def owned_values(self) -> Mapping[str, Mapping[str, OwnedValue]]:
        """See `Child.owned_values`; of a stack, keys end in the index of the matrix."""
        found: dict[str, dict[str, OwnedValue]] = {}
        for matrix in self._matrices():
            of_param = found.setdefault(matrix.route.info.name, {})
            for key, value in matrix.state.values().items():
                of_param[key + matrix.place.label] = value
        return {name: values for name, values in found.items() if values}

    def load_owned_values(self, values: Mapping[str, Mapping[str, OwnedValue]]) -> None:
        """See `Child.load_owned_values`."""
        for matrix in self._matrices():
            given = values.get(matrix.route.info.name, {})
            self._draft(matrix)
            label = matrix.place.label
            mine = {k.removesuffix(label): v for k, v in given.items() if k.endswith(label)}
            matrix.state.load_values(mine)

    def restart(self, params: Collection[str]) -> None:
        """See `Child.restart`."""
        for matrix in self._matrices():
            if matrix.route.info.name in params:
                matrix.state.restart()

    def _take(self, bucket: WholeBucket, label: str) -> None:
        """Put gradients and masters together at the owners."""
        ways = (bucket.grads, bucket.weights)
        with self._kept.keeping(label):
            bucket.grads.row.copy_(bucket.master.gradient())
            bucket.weights.row.copy_(bucket.master.row)
            for way in ways:
                way.rows.pack_out()
        for handle in [way.rows.start_out(label) for way in ways]:
            handle.wait()
        with self._kept.keeping(label):
            for way in ways:
                way.rows.finish_out()
                way.tensor.pack_out()
        for handle in [way.tensor.start_out(label) for way in ways]:
            handle.wait()
        with self._kept.keeping(label):
            for way in ways:
                way.tensor.finish_out()

    def _advance(self, matrix: WholeMatrix, group: ParamGroup, first: bool) -> None:
        """One step of one matrix, with the present learning rate and decay."""
        if first:
            matrix.state.restart()
        matrix.state.resume()
        optimizer = matrix.state.optimizer
        settings = optimizer.param_groups[0]
        settings["lr"] = float(group["lr"])
        if "weight_decay" in settings:
            settings["weight_decay"] = float(group["weight_decay"])
        matrix.param.grad = matrix.grad
        optimizer.step()
        matrix.param.grad = None
        self.num_stepped += 1

    def _return(self, bucket: WholeBucket, label: str) -> None:
        """Bring the new masters back to their rows."""
        way = bucket.weights
        with self._kept.keeping(label):
            way.tensor.pack_back()
        way.tensor.start_back(label).wait()
        with self._kept.keeping(label):
            way.tensor.finish_back()
            way.rows.pack_back()
        way.rows.start_back(label).wait()
        with self._kept.keeping(label):
            way.rows.finish_back()
            bucket.master.row.copy_(way.row)

    def _draft(self, matrix: WholeMatrix) -> None:
        if matrix.state.is_made:
            return
        probe = torch.nn.Parameter(torch.zeros_like(matrix.param))
        probe.grad = torch.zeros_like(probe)
        with torch.no_grad():
            matrix.state.draft(self._factory.make(probe, _PROBE_LR))

    def _matrices(self) -> list[WholeMatrix]:
        return [matrix for bucket in self._buckets for matrix in bucket.owned]

    def _bucket(
        self, master: MasterRow, matrices: Sequence[int], part: ExchangeSchedule
    ) -> WholeBucket:
        """Make all views and optimizers of one bucket, once."""
        shapes: dict[int, Shape] = {}
        boxes: dict[int, ShardBoxes] = {}
        for matrix in matrices:
            route = self._route(matrix)
            if route.matrix is None:
                raise StateError(f"parameter {route.info.name!r} is in a bucket of matrices")
            view, [unit] = route.matrix, route.matrix.units
            shapes[matrix] = (unit.rows, view.cols)
            boxes[matrix] = view.unit_boxes(unit, self._groups.tensor.size)

        def way(number: int) -> Way:
            row, buffers = self._workspace[number][: master.row.numel()], self._buffers[number]
            rows = RowExchange(part, self._groups.reduce, buffers, row)
            over = self._groups.tensor
            tensor = TensorExchange(part, over, buffers, rows.local, shapes, boxes)
            return Way(row=row, rows=rows, tensor=tensor)

        grads, weights = way(0), way(1)
        owned = tuple(
            self._matrix(matrix, whole, grads.tensor.matrices[matrix])
            for matrix, whole in weights.tensor.matrices.items()
        )
        return WholeBucket(master=master, grads=grads, weights=weights, owned=owned)

    def _matrix(self, matrix: int, whole: torch.Tensor, grad: torch.Tensor) -> WholeMatrix:
        route = self._route(matrix)
        param = torch.nn.Parameter(whole)
        optimizer = self._factory.make(param, _PROBE_LR)
        local = int(self._plan.matrix_start[matrix] // self._plan.matrix_numel[matrix])
        return WholeMatrix(
            route=route,
            place=place_of(route, local),
            param=param,
            grad=grad,
            state=WholeState(optimizer, param),
        )

    def _route(self, matrix: int) -> Route:
        return self._routes[self._plan.params[int(self._plan.matrix_param[matrix])].name]
