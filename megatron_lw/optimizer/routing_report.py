"""The routing report: for every parameter its child, matrices, scale, owner, group, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.matrix_view import MatrixView
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Route
from megatron_lw.optimizer.runtime import Runtime
from megatron_lw.optimizer.tp_mode import TpMode, home_of

_HEADER = (
    "parameter", "shape", "dtype", "child", "matrix", "scale", "owner", "group", "because"
)  # fmt: skip
_FEW = 4
_NONE = "-"


def routing_report(
    runtime: Runtime, param_groups: Sequence[ParamGroup], groups: ParallelGroups
) -> str:
    """A table of this rank's parameters.

    `scale` is what the learning rate is multiplied with, by the present settings; `owner` the rank
    of the world that orthogonalises, `0+1` where several do, each a shard or all of them the whole.

    Args:
        runtime: routes, plans and children.
        param_groups: with their present settings.
        groups: for the ranks.
    """
    settings = {group["name"]: group for group in param_groups}
    scales: dict[str, float | tuple[float, ...]] = {}
    mode: TpMode = "owner"
    for child in runtime.matrix_children:
        scales.update(child.ratios(settings))
        mode = child.tp_mode
    owners: dict[str, list[str]] = {}
    for domain, plan in runtime.plans.items():
        over = groups.domain(domain)
        routes = {route.info.name: route for route in runtime.routing.routes}
        found = _owners(plan, routes, over.exchange.ranks, mode)
        owners.update(found)
    rows = [_row(route, scales, owners) for route in runtime.routing.routes]
    widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [_HEADER, *rows]
    ]
    return "\n".join(lines)


def _row(
    route: Route,
    scales: Mapping[str, float | tuple[float, ...]],
    owners: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    name, scale = route.info.name, scales.get(route.info.name, ())
    each = scale if isinstance(scale, tuple) else (scale,)
    return (
        name,
        "x".join(map(str, route.info.local_shape)) or "scalar",
        route.info.dtype,
        route.child,
        _matrix_text(route.matrix),
        " + ".join(_counted(f"{value:.4g}" for value in each)) or _NONE,
        _some(owners.get(name, ())) or _NONE,
        route.group.name,
        route.reason,
    )


def _owners(
    plan: OwnershipPlan, routes: Mapping[str, Route], ranks: Sequence[int], mode: TpMode
) -> dict[str, list[str]]:
    """Parameter name -> who orthogonalises its matrices, each once."""
    owners: dict[str, list[str]] = {}
    for matrix, owner in enumerate(plan.owner.tolist()):
        name = plan.params[int(plan.matrix_param[matrix])].name
        view = routes[name].matrix
        if view is None:
            continue
        unit = view.units[int(plan.matrix_unit[matrix])]
        first = owner - owner % plan.tp
        together = home_of(mode, view, unit, plan.tp) != "owner"
        places = range(first, first + plan.tp) if together else (owner,)
        text = "+".join(str(ranks[place]) for place in places)
        if text not in owners.setdefault(name, []):
            owners[name].append(text)
    return owners


def _matrix_text(view: MatrixView | None) -> str:
    if view is None:
        return _NONE
    text = " + ".join(_counted(f"{rows}x{cols}" for rows, cols in view.shapes))
    if view.unused_rows:
        text += f" + {view.unused_rows} rows without update"
    if view.count == 1:
        return text
    return f"{view.count} of {f'({text})' if '+' in text else text}"


def _counted(texts: Iterable[str]) -> list[str]:
    """Texts, equal ones that follow each other as one with their number."""
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return [text if number == 1 else f"{number} x {text}" for text, number in runs]


def _some(texts: Sequence[str]) -> str:
    few = " ".join(texts[:_FEW])
    return few if len(texts) <= _FEW else f"{few} ... ({len(texts)})"
