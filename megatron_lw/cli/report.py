"""The report of `megatron-lw plan`: the worst stage of every domain, as tables or JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_lw.cli.sizes import human_size
from megatron_lw.optimizer.owners import SLACK
from megatron_lw.optimizer.plan import OwnershipPlan, PlanMetrics

Values = dict[str, float]
_Pick = Callable[[Iterable[float]], float]

# What counts as worst over stages and domains. The exchange and its limit belong together: both
# come from the plan that is closest to its limit.
_WORST: Mapping[str, _Pick] = MappingProxyType(
    {
        "padding_fraction": max,
        "ns_makespan_over_bound": max,
        "ns_makespan_lpt_over_bound": max,
        "matrices_whole_fraction": min,
        "row_over_largest": min,
        "memory_over_ideal": max,
        "num_buckets": max,
        "num_matrices": max,
        "ranks_without_matrix": max,
        "max_peers": max,
        "tp_exchange_fraction": max,
        "state_bytes": max,
        "gradient_bytes": max,
        "workspace_bytes": max,
        "reduce_bytes": max,
        "gather_bytes": max,
        "exchange_bytes": max,
        "tp_exchange_bytes": max,
    }
)
_EXCHANGE = ("exchange_busiest", "exchange_limit")

# Bytes that a rank has for each domain at the same time, so that a stage's domains add up.
_ADDED = (
    "state_bytes",
    "gradient_bytes",
    "reduce_bytes",
    "gather_bytes",
    "exchange_bytes",
    "tp_exchange_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The worst values, of each domain over the stages, and over all.

    Attributes:
        domains: Values of each domain.
        overall: Values over all domains; bytes that a rank has for every domain are added.
    """

    domains: Mapping[str, Values]
    overall: Values


def summarise(plans: Sequence[Mapping[str, OwnershipPlan]]) -> Report:
    """Reduce the plans of every stage and domain to the worst values.

    Args:
        plans: For each pipeline stage the plans of its domains.
    """
    stages = [
        {domain: _values(plan.metrics()) for domain, plan in stage.items()} for stage in plans
    ]
    names = sorted({domain for stage in stages for domain in stage})
    domains = {name: _worst([stage[name] for stage in stages if name in stage]) for name in names}
    overall = _worst(list(domains.values()))
    for key in _ADDED:
        overall[key] = max(sum(values[key] for values in stage.values()) for stage in stages)
    return Report(domains=domains, overall=overall)


def as_json(report: Report) -> dict[str, object]:
    """Return the report as plain JSON values; what is infinite (a row over no matrix) is null."""
    return {
        "domains": {name: _finite(values) for name, values in report.domains.items()},
        "overall": _finite(report.overall),
    }


def print_report(report: Report, *, title: str) -> None:
    """Print the report as tables."""
    console = Console()
    console.print(title, style="bold", highlight=False)
    console.print(_bytes_table(report))
    console.print(_promise_table(report))


def _values(metrics: PlanMetrics) -> Values:
    everything = asdict(metrics)
    return {key: everything[key] for key in (*_WORST, *_EXCHANGE)}


def _worst(candidates: Sequence[Values]) -> Values:
    worst = {key: pick(values[key] for values in candidates) for key, pick in _WORST.items()}
    tightest = max(candidates, key=_exchange_use)
    return worst | {key: tightest[key] for key in _EXCHANGE}


def _exchange_use(values: Values) -> float:
    limit = values["exchange_limit"]
    return values["exchange_busiest"] / limit if limit else 0.0


def _finite(values: Values) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _bytes_table(report: Report) -> Table:
    table = _table("one rank, a step", [*report.domains, "total"])
    labels = {
        "state_bytes": "masters and states",
        "gradient_bytes": "gradients",
        "workspace_bytes": "peak workspace (estimate)",
        "reduce_bytes": "sent: reduce-scatter",
        "gather_bytes": "sent: all-gather",
        "exchange_bytes": "sent: exchange, busiest rank",
        "tp_exchange_bytes": "sent: tensor-parallel exchange",
    }
    for key, label in labels.items():
        columns = [*report.domains.values(), report.overall]
        table.add_row(label, *(human_size(values[key]) for values in columns))
    return table


def _promise_table(report: Report) -> Table:
    table = _table("plan", [*report.domains, "worst", "promise"])
    columns = [*report.domains.values(), report.overall]
    limit = report.overall["exchange_limit"]
    lpt = max(SLACK, report.overall["ns_makespan_lpt_over_bound"])
    rows: list[tuple[str, str, str, str]] = [
        ("padding", "padding_fraction", ".4%", "< 0.1%"),
        ("Newton-Schulz makespan / bound", "ns_makespan_over_bound", ".4f", f"<= {lpt:.4f}"),
        ("longest-first makespan / bound", "ns_makespan_lpt_over_bound", ".4f", ""),
        ("exchange / reduce and gather", "exchange_busiest", ".4%", f"<= {limit:.4%}"),
        ("row / largest matrix", "row_over_largest", ".2f", ""),
        ("matrices whole in a row", "matrices_whole_fraction", ".1%", ""),
        ("states / even share", "memory_over_ideal", ".4f", "<= 1.02"),
        ("buckets", "num_buckets", ".0f", ""),
        ("matrices", "num_matrices", ".0f", ""),
        ("ranks without a matrix", "ranks_without_matrix", ".0f", ""),
        ("most peers of a rank", "max_peers", ".0f", ""),
    ]
    for label, key, form, promise in rows:
        table.add_row(label, *(format(values[key], form) for values in columns), promise)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.ASCII, title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
