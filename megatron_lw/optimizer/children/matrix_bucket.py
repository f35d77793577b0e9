"""What a matrix child keeps of one bucket: views, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from megatron_lw.distributed.collectives import Handle
from megatron_lw.distributed.group import Group
from megatron_lw.errors import StateError
from megatron_lw.optimizer.children.base import GroupRange
from megatron_lw.optimizer.children.exchange import RowExchange, TensorExchange
from megatron_lw.optimizer.children.ns_workspace import workspace_numel
from megatron_lw.optimizer.children.owned import OwnedMatrices, OwnedUnit
from megatron_lw.optimizer.children.place import Place, place_of
from megatron_lw.optimizer.children.schedule import ExchangeSchedule
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.matrix_view import MatrixUnit, MatrixView, Shape
from megatron_lw.optimizer.pieces import IntArray
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Route
from megatron_lw.optimizer.tp_mode import Home, TpMode, home_of
from megatron_lw.optimizer.workspace import BATCH_BELOW, BATCH_WORKSPACE

_ALIGNMENT = 64
_CPU_RUN = 1 << 18
"""Elements of a run at most on a CPU, where adding bf16 to fp32 makes an fp32 copy of the run: one
that stays in the cache takes a quarter of the time of one of 32 MiB, which is mapped anew."""
Kind = tuple[str, Shape]
"""Parameter group and shape of a whole matrix: what has one scale."""


class UnitFacts(NamedTuple):
    """A matrix of the plan as its parameter's view has it.

    Attributes:
        view: of the parameter.
        unit: which rows it is.
        home: who orthogonalises it.
        group: the parameter group.
    """

    view: MatrixView
    unit: MatrixUnit
    home: Home
    group: str

    def rows_on(self, over: Group) -> IntArray:
        """[rows] which rows of the unit this rank has when it orthogonalises it."""
        if self.home == "parts":
            return self.view.local_rows(self.unit, over.size, over.rank)
        return np.arange(self.unit.rows, dtype=np.int64)

    def ordinal(self, part: int) -> int | None:
        """Which matrix of a stored one a part is; None where that is one matrix."""
        before = self.view.units[: self.view.units.index(self.unit)]
        number = sum(len(unit.parts) for unit in before) + part
        return number if len(self.view.shapes) > 1 else None

    def shape_on(self, over: Group) -> Shape:
        """Rows and columns that this rank has of the unit when it orthogonalises it."""
        if self.home == "parts":
            return self.view.local_shape(self.unit.rows, over.size)
        return self.unit.rows, self.view.cols


@dataclass(frozen=True, slots=True)
class RowPart:
    """The runs of one parameter group and matrix shape in this rank's row.

    Attributes:
        group: name of the parameter group.
        shape: rows and columns of each whole matrix; None for rows of padding, which only decay.
        weights: views of the master row, one a run.
        updates: views of the workspace row, one a run.
    """

    group: str
    shape: Shape | None
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
        parts: runs of this row, by group and shape.
        rows: carries pieces between rows.
        tensor: carries shards between tensor-parallel ranks.
        owned: matrices that this rank orthogonalises.
        batches: of these, the ones that it orthogonalises by itself, as they are batched.
        shared: the ones of which it has a shard, each [short, its part of the long side].
        refined: what is changed after it has been orthogonalised.
        handle: the all-to-all under way.
    """

    master: MasterRow
    momentum: torch.Tensor
    row: torch.Tensor
    ranges: tuple[GroupRange, ...]
    parts: tuple[RowPart, ...]
    rows: RowExchange
    tensor: TensorExchange
    owned: OwnedMatrices
    batches: tuple[list[torch.Tensor], ...]
    shared: tuple[torch.Tensor, ...]
    refined: tuple[RefinedMatrix, ...]
    handle: Handle = field(default_factory=Handle)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.master.bucket.label


def view_of(route: Route) -> MatrixView:
    """The matrices of a parameter of a matrix child.

    Raises:
        StateError: it has none.
    """
    if route.matrix is None:
        raise StateError(f"parameter {route.info.name!r} is in a bucket of matrices")
    return route.matrix


def unit_facts(
    plan: OwnershipPlan,
    matrices: Iterable[int],
    routes: Mapping[str, Route],
    mode: TpMode,
    tp_size: int,
) -> dict[int, UnitFacts]:
    """Matrix index -> facts, of matrices of the plan.

    Raises:
        StateError: one is of a parameter without a matrix.
    """
    found = {}
    for matrix in matrices:
        route = routes[plan.params[int(plan.matrix_param[matrix])].name]
        view = view_of(route)
        unit = view.units[int(plan.matrix_unit[matrix])]
        home = home_of(mode, view, unit, tp_size)
        found[matrix] = UnitFacts(view, unit, home, route.group.name)
    return found


def held_units(
    plan_part: ExchangeSchedule, facts: Mapping[int, UnitFacts], over: Group
) -> Iterator[tuple[MatrixUnit, IntArray, int]]:
    """The units that this rank orthogonalises, with the rows and columns that it has of them."""
    for m in plan_part.gathered:
        known = facts[m.matrix]
        if known.home != "owner" or m.owner == over.rank:
            yield known.unit, known.rows_on(over), known.shape_on(over)[1]


def owned_units(
    tensor: TensorExchange, facts: Mapping[int, UnitFacts], over: Group
) -> list[OwnedUnit]:
    """The same with the tensors in which the exchange leaves them."""
    return [
        OwnedUnit(
            matrix=matrix,
            unit=facts[matrix].unit,
            values=values,
            rows=facts[matrix].rows_on(over),
            cols=facts[matrix].view.cols,
            in_parts=facts[matrix].home == "parts",
        )
        for matrix, values in tensor.matrices.items()
    ]


def kinds_of(routes: Iterable[Route]) -> frozenset[Kind]:
    """Every parameter group and shape of a matrix among some parameters."""
    return frozenset(
        (route.group.name, shape) for route in routes for shape in view_of(route).shapes
    )


def recorded_here(
    plan: OwnershipPlan, routes: Mapping[str, Route], exchange: Group
) -> tuple[str, ...]:
    """Parameters of which this rank keeps the record: it owns their first matrix.

    Of a stack that is divided over expert parallelism, the rank with its first part keeps it.
    """
    first: dict[str, int] = {}
    for matrix, owner in enumerate(plan.owner.tolist()):
        first.setdefault(plan.params[int(plan.matrix_param[matrix])].name, owner)
    infos = {name: route.info for name, route in routes.items()}
    return tuple(
        name
        for name, info in infos.items()
        if first[name] == exchange.rank and (info.ep_size == 1 or info.boxes[0].world.start[0] == 0)
    )


def refined_matrices(
    owned: OwnedMatrices,
    facts: Mapping[int, UnitFacts],
    plan: OwnershipPlan,
    routes: Mapping[str, Route],
    own_shapes: Callable[[Shape], Mapping[str, tuple[int, ...]]] | None,
    device: torch.device,
) -> tuple[RefinedMatrix, ...]:
    """What this rank refines, with states of zeros; nothing where `own_shapes` is None.

    Args:
        owned: what it orthogonalises.
        facts: of these, by matrix index.
        plan: where they are in their parameters.
        routes: parameter name -> route.
        own_shapes: see `MatrixChild.own_shapes`.
        device: where states are kept.
    """
    found: list[RefinedMatrix] = []
    if own_shapes is None:
        return ()
    for each in owned.matrices:
        param = plan.params[int(plan.matrix_param[each.matrix])]
        local = int(plan.matrix_start[each.matrix]) // (param.numel // param.count)
        place = place_of(routes[param.name], local, facts[each.matrix].ordinal(each.part))
        states = {
            key: torch.zeros(shape, dtype=torch.float32, device=device)
            for key, shape in own_shapes(each.shape).items()
        }
        found.append(RefinedMatrix(place, facts[each.matrix].group, each.values, states))
    return tuple(found)


def row_parts(
    master: MasterRow, routes: Mapping[str, Route], tensor: Group, row: torch.Tensor
) -> tuple[RowPart, ...]:
    """The runs of a row by group and shape, so that one fused call steps each kind.

    Runs that touch are one, so long as no element changes its place in the 64 that a kernel may
    take at once: at the end of a run it rounds otherwise. On a CPU long ones are cut, likewise.

    Args:
        master: the row.
        routes: parameter name -> route.
        tensor: the tensor-parallel group of its domain.
        row: the workspace row.
    """
    kinds: dict[tuple[str, Shape | None], list[slice]] = {}
    for name, slot in master.bucket.row_slots():
        route = routes[name]
        for run in view_of(route).local_runs(tensor.size, tensor.rank):
            start = max(run.start, slot.param_start)
            stop = min(run.stop, slot.param_start + slot.numel)
            if start < stop:
                place = slot.row_start - slot.param_start
                runs = kinds.setdefault((route.group.name, run.shape), [])
                _append_run(runs, slice(start + place, stop + place))
    if row.device.type == "cpu":
        kinds = {kind: _cut(runs) for kind, runs in kinds.items()}
    return tuple(
        RowPart(
            group,
            shape,
            tuple(master.row[run] for run in runs),
            tuple(row[run] for run in runs),
        )
        for (group, shape), runs in kinds.items()
    )


def _append_run(runs: list[slice], run: slice) -> None:
    if runs and runs[-1].stop == run.start and not (runs[-1].start | run.start) % _ALIGNMENT:
        run = slice(runs.pop().start, run.stop)
    runs.append(run)


def _cut(runs: Sequence[slice]) -> list[slice]:
    return [
        slice(start, min(start + _CPU_RUN, run.stop))
        for run in runs
        for start in range(run.start, run.stop, _CPU_RUN)
    ]


def iteration_workspace(batches: Sequence[Sequence[torch.Tensor]]) -> int:
    """Elements that the iteration over one bucket's matrices needs, small ones in batches."""
    needed = 0
    for batch in batches:
        short, longest = min(batch[0].shape), max(max(x.shape) for x in batch)
        count = len(batch) if short < BATCH_BELOW else 1
        together = workspace_numel(count, short, longest)
        needed = max(needed, workspace_numel(1, short, longest), min(together, BATCH_WORKSPACE))
    return needed
