"""The planner's input: one record a parameter, checked, and the canonical and backward orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.names import natural_key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUnit:
    """A run of rows of a global matrix that has an owner of its own.

    Attributes:
        start: First row.
        rows: Number of rows.
        matrices: (rows, cols) of each matrix that is orthogonalised in it; several where their rows
            lie among each other, fewer rows than the run has where some are padding.
    """

    start: int
    rows: int
    matrices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParam:
    """What the planner needs to know of one parameter.

    Attributes:
        name: Global name.
        numel: Local elements, what lies in the buffers.
        child: Name of the child optimizer that steps it.
        matrix: (rows, cols) of one global matrix; None under an element-wise child.
        count: Matrices stacked in it, each a contiguous run of `numel // count` local elements.
        units: Runs of rows of one matrix that are owned; rows of none take no part in the exchange.
            Empty: every matrix is one unit.
        chunk: Model chunk (virtual pipeline).
        tied: Tied name; gives it a bucket of its own, laid out alike wherever a copy lives.
        sharded: True where tensor parallelism cuts it, so that `numel` is 1/tp of the global
            tensor.
        group: Parameter-group name; element-wise buckets are laid out group by group.
    """

    name: str
    numel: int
    child: str
    matrix: tuple[int, int] | None = None
    count: int = 1
    units: tuple[PlanUnit, ...] = ()
    chunk: int = 0
    tied: str | None = None
    sharded: bool = False
    group: str = ""

    @property
    def owned_units(self) -> tuple[PlanUnit, ...]:
        """The units of one stacked matrix; none where it is stepped element by element."""
        if self.matrix is None or self.units:
            return self.units
        return (PlanUnit(start=0, rows=self.matrix[0], matrices=(self.matrix,)),)

    def values(self) -> list[object]:
        """Return all fields, in the order in which they are declared."""
        return [
            self.name,
            self.numel,
            self.child,
            self.matrix,
            self.count,
            tuple((unit.start, unit.rows, unit.matrices) for unit in self.units),
            self.chunk,
            self.tied,
            self.sharded,
            self.group,
        ]


def canonical_order(params: Iterable[PlanParam], tp: int) -> tuple[PlanParam, ...]:
    """Check the parameters of a domain and return them sorted by natural name.

    Raises:
        ConfigError: If a parameter contradicts itself or another; names it.
    """
    ordered = tuple(sorted(params, key=lambda param: natural_key(param.name)))
    kinds: dict[str, PlanParam] = {}
    for i, param in enumerate(ordered):
        if i and ordered[i - 1].name == param.name:
            raise ConfigError(f"parameter {param.name!r} is given twice: names must be unique")
        _check_param(param, tp)
        first = kinds.setdefault(param.child, param)
        if (first.matrix is None) != (param.matrix is None):
            raise ConfigError(
                f"child {param.child!r} steps {first.name!r} with matrix={first.matrix} and "
                f"{param.name!r} with matrix={param.matrix}: give matrices and element-wise "
                "parameters different children"
            )
    return ordered


def _check_param(param: PlanParam, tp: int) -> None:
    if not param.name or not param.child:
        raise ConfigError(f"parameter {param.name!r} with child {param.child!r}: both need a name")
    if param.numel < 0 or param.chunk < 0:
        raise ConfigError(
            f"parameter {param.name!r} has numel={param.numel}, chunk={param.chunk}: "
            "neither may be negative"
        )
    if param.count < 1 or param.numel % param.count:
        raise ConfigError(
            f"parameter {param.name!r} stacks count={param.count} matrices in "
            f"numel={param.numel} elements: count must be at least 1 and divide numel"
        )
    if param.matrix is None:
        if param.units:
            raise ConfigError(f"parameter {param.name!r} has units, but no matrix: give both")
        return
    rows, cols = param.matrix
    parts = tp if param.sharded else 1
    if rows < 1 or cols < 1 or param.count * rows * cols != param.numel * parts:
        raise ConfigError(
            f"parameter {param.name!r} has numel={param.numel} local elements, but "
            f"count={param.count} matrices of {rows} x {cols} over {parts} tensor-parallel parts "
            f"have {param.count * rows * cols / parts:g}: give the global matrix, and "
            "sharded=True exactly where tensor parallelism cuts it"
        )
    _check_units(param)


def _check_units(param: PlanParam) -> None:
    """Check that units are runs of rows, one after another, that divide into whole elements."""
    rows, cols = param.matrix or (0, 0)
    end, numel = 0, param.numel // param.count
    for unit in param.units:
        used = sum(height for height, _ in unit.matrices)
        fits = end <= unit.start and unit.start + unit.rows <= rows and 0 < used <= unit.rows
        whole = not (unit.start * numel % rows or unit.rows * numel % rows)
        if not fits or not whole or any(width != cols for _, width in unit.matrices):
            raise ConfigError(
                f"parameter {param.name!r} of {rows} x {cols}: {unit} is no run of its rows beyond "
                f"row {end} that holds its matrices: mend the declared blocks"
            )
        end = unit.start + unit.rows


def backward_indices(ordered: Sequence[PlanParam], names: Sequence[str] | None) -> list[int]:
    """Return the indices of `ordered` in the order in which backward completes the parameters."""
    if names is None:
        return list(range(len(ordered) - 1, -1, -1))
    index = {param.name: i for i, param in enumerate(ordered)}
    if len(names) != len(index) or set(names) != set(index):
        odd = sorted(set(names) ^ set(index)) or sorted(
            name for name in set(names) if names.count(name) > 1
        )
        raise ConfigError(f"backward_order must name every parameter once; it differs in {odd[:3]}")
    return [index[name] for name in names]
