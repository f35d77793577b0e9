"""From routed parameters to the plans of their domains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_lw.groups import DOMAINS, Domain
from megatron_lw.optimizer.matrix_view import MatrixView
from megatron_lw.optimizer.plan import OwnershipPlan, PlanParam, PlanUnit, plan_domain
from megatron_lw.optimizer.routing import Route


def plan_routes(
    routes: Sequence[Route],
    sizes_of: Callable[[Domain], tuple[int, int]],
    bucket_size: int | None,
) -> dict[Domain, OwnershipPlan]:
    """Plan every domain that has parameters.

    Args:
        routes: the parameters of one rank.
        sizes_of: rows and tensor-parallel ranks of a domain.
        bucket_size: as in `DDPConfig`.

    Raises:
        ConfigError: a parameter contradicts itself or another.
    """
    plans: dict[Domain, OwnershipPlan] = {}
    for domain in DOMAINS:
        params = [_plan_param(route) for route in routes if route.info.domain == domain]
        if params:
            rows, tensor = sizes_of(domain)
            plans[domain] = plan_domain(
                params, domain=domain, dp=rows, tp=tensor, bucket_size=bucket_size
            )
    return plans


def _plan_param(route: Route) -> PlanParam:
    matrix = route.matrix
    return PlanParam(
        name=route.info.name,
        numel=route.info.numel,
        child=route.child,
        matrix=None if matrix is None else (matrix.rows, matrix.cols),
        count=1 if matrix is None else matrix.count,
        units=() if matrix is None else _plan_units(matrix),
        chunk=route.info.chunk,
        tied=route.info.tied,
        sharded=route.info.tp_dim is not None,
        group=route.group.name,
    )


def _plan_units(view: MatrixView) -> tuple[PlanUnit, ...]:
    """The units as the planner knows them; none where a stored matrix is one."""
    units = tuple(
        PlanUnit(
            start=unit.start,
            rows=unit.rows,
            matrices=tuple((part.rows, view.cols) for part in unit.parts),
        )
        for unit in view.units
    )
    whole = PlanUnit(start=0, rows=view.rows, matrices=((view.rows, view.cols),))
    return () if units == (whole,) else units
