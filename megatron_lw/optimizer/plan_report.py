"""What a plan costs and how it keeps its promises: bytes, padding, balance, exchange, peers.

All bytes are bytes *sent*, and where ranks differ the busiest is reported. The promises are those
of the design: padding, makespan, exchange and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_lw.optimizer.pieces import Sent, count_peers, count_sent
from megatron_lw.optimizer.workspace import peak_workspace_numel

if TYPE_CHECKING:
    from megatron_lw.optimizer.plan import OwnershipPlan

MASTER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of one element, on each wire and in each optimizer state.

    Attributes:
        reduce: Gradient in the reduce-scatter.
        gather: Weight in the all-gather.
        exchange: Piece or update in the exchange, also the Newton-Schulz input.
        matrix_state: Optimizer state of a matrix besides the fp32 master.
        elementwise_state: The same of an element-wise parameter.
    """

    reduce: int
    gather: int
    exchange: int
    matrix_state: int
    elementwise_state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMetrics:
    """The measured properties of a plan; per rank where they say so.

    Attributes:
        domain: Name of the domain.
        numel: Logical elements on one tensor-parallel rank.
        padding: Padding elements in all buckets.
        padding_limit: What the padding may be at most: 64 x dp a bucket and 64 a parameter.
        padding_fraction: Padding over logical elements.
        num_buckets: Number of buckets.
        num_parameters: Number of parameters.
        num_matrices: Number of matrices.
        matrices_whole_fraction: Share of matrices that lie in one row (1 without matrices).
        row_over_largest: Row over largest local matrix, of the bucket where that is least (inf
            without matrices).
        ns_makespan_over_bound: Newton-Schulz cost of the busiest rank over the lower bound.
        ns_makespan_lpt_over_bound: The same of plain longest-first.
        ranks_without_matrix: Ranks that own no matrix.
        max_peers: Most ranks that one rank exchanges with.
        reduce_bytes: Bytes a rank sends in the reduce-scatters of a step.
        gather_bytes: Bytes a rank sends in the all-gathers of a step.
        exchange_bytes: Bytes the busiest rank sends between rows, both ways.
        exchange_busiest: `exchange_bytes` over `reduce_bytes + gather_bytes` (0 for dp 1).
        exchange_limit: The promise for `exchange_busiest`.
        tp_exchange_bytes: Bytes the busiest rank sends within its row, both ways.
        tp_exchange_fraction: What an average rank sends within its row, one way, over its matrix
            bytes; the promise is (tp - 1) / tp.
        state_bytes: Masters and optimizer states of a rank.
        memory_over_ideal: `state_bytes` over the states of all ranks / dp.
        gradient_bytes: Gradient storage of a rank.
        workspace_bytes: Peak exchange and Newton-Schulz workspace of the busiest rank, an estimate.
    """

    domain: str
    numel: int
    padding: int
    padding_limit: int
    padding_fraction: float
    num_buckets: int
    num_parameters: int
    num_matrices: int
    matrices_whole_fraction: float
    row_over_largest: float
    ns_makespan_over_bound: float
    ns_makespan_lpt_over_bound: float
    ranks_without_matrix: int
    max_peers: int
    reduce_bytes: float
    gather_bytes: float
    exchange_bytes: float
    exchange_busiest: float
    exchange_limit: float
    tp_exchange_bytes: float
    tp_exchange_fraction: float
    state_bytes: int
    memory_over_ideal: float
    gradient_bytes: int
    workspace_bytes: int


def measure(plan: OwnershipPlan, sizes: ElementBytes) -> PlanMetrics:
    """Measure a plan.

    Args:
        plan: The plan of one domain.
        sizes: Bytes of an element on each wire and in each state.
    """
    numel = sum(param.numel for param in plan.params)
    row = sum(bucket.row_length for bucket in plan.buckets)
    padding = plan.dp * row - numel
    row_over_largest = _row_over_largest(plan)
    reduce_bytes, gather_bytes = (
        (plan.dp - 1) * row * each for each in (sizes.reduce, sizes.gather)
    )
    sent = count_sent(plan.owner, plan.pieces, plan.sharded, dp=plan.dp, tp=plan.tp)
    exchange_bytes = float(sent.between.max()) * sizes.exchange
    carried = reduce_bytes + gather_bytes
    states, ideal = _state_bytes(plan, sizes)
    pieces_of = np.bincount(plan.pieces.matrix, minlength=len(plan.owner))
    return PlanMetrics(
        domain=plan.domain,
        numel=numel,
        padding=padding,
        padding_limit=64 * (plan.dp * len(plan.buckets) + len(plan.params)),
        padding_fraction=padding / max(1, numel),
        num_buckets=len(plan.buckets),
        num_parameters=len(plan.params),
        num_matrices=len(plan.owner),
        matrices_whole_fraction=float((pieces_of == 1).mean()) if len(plan.owner) else 1.0,
        row_over_largest=row_over_largest,
        ns_makespan_over_bound=plan.makespan / plan.bound if plan.bound else 1.0,
        ns_makespan_lpt_over_bound=plan.lpt_makespan / plan.bound if plan.bound else 1.0,
        ranks_without_matrix=int((np.bincount(plan.owner, minlength=plan.dp * plan.tp) == 0).sum()),
        max_peers=int(count_peers(plan.owner, plan.pieces, dp=plan.dp, tp=plan.tp).max()),
        reduce_bytes=reduce_bytes,
        gather_bytes=gather_bytes,
        exchange_bytes=exchange_bytes,
        exchange_busiest=exchange_bytes / carried if carried else 0.0,
        exchange_limit=exchange_limit(plan, row_over_largest),
        tp_exchange_bytes=float((sent.within_out + sent.within_back).max()) * sizes.exchange,
        tp_exchange_fraction=_tp_exchange_fraction(plan, sent),
        state_bytes=states,
        memory_over_ideal=states / ideal if ideal else 1.0,
        gradient_bytes=plan.dp * row * sizes.reduce,
        workspace_bytes=int(peak_workspace_numel(plan).max()) * sizes.exchange,
    )


def exchange_limit(plan: OwnershipPlan, row_over_largest: float) -> float:
    """Return the promise for the busiest rank's exchange over its reduce-scatter and all-gather.

    0.4 / dp where a row is at least twice the largest matrix, else 1 / (dp - 1) + 2 x largest
    matrix / model, both as one tensor-parallel rank has them.
    """
    if plan.dp == 1:
        return 0.0
    if row_over_largest >= 2:
        return 0.4 / plan.dp
    numel = sum(param.numel for param in plan.params)
    return 1 / (plan.dp - 1) + 2 * int(plan.matrix_numel.max()) / numel


def _row_over_largest(plan: OwnershipPlan) -> float:
    largest = np.zeros(len(plan.buckets), dtype=np.int64)
    np.maximum.at(largest, plan.matrix_bucket, plan.matrix_numel)
    ratios = [
        bucket.row_length / int(size)
        for bucket, size in zip(plan.buckets, largest, strict=True)
        if size
    ]
    return min(ratios, default=float("inf"))


def _state_bytes(plan: OwnershipPlan, sizes: ElementBytes) -> tuple[int, float]:
    """Return a rank's bytes of masters and states, and its even share of what is not padding."""
    stored, logical = 0, 0
    for bucket in plan.buckets:
        matrix = plan.is_matrix_bucket(bucket.index)
        width = MASTER_BYTES + (sizes.matrix_state if matrix else sizes.elementwise_state)
        stored += bucket.row_length * width
        logical += sum(plan.params[index].numel for index in bucket.params) * width
    return stored, logical / plan.dp


def _tp_exchange_fraction(plan: OwnershipPlan, sent: Sent) -> float:
    held = plan.tp * int(plan.pieces.numel.sum())
    return float(max(sent.within_out.sum(), sent.within_back.sum())) / held if held else 0.0


def describe(plan: OwnershipPlan) -> str:
    """Return a plan as a table: sizes, one line a bucket, balance, exchange."""
    metrics = plan.metrics()
    head = [
        f"plan of domain {plan.domain}: {metrics.num_parameters} parameters, "
        f"{metrics.numel:,} elements",
        f"{plan.dp} rows x {plan.tp} tensor-parallel ranks, alignment {plan.alignment}",
        f"digest {plan.digest()}",
    ]
    return "\n".join([*head, "", *_bucket_table(plan), "", *_summary(plan, metrics)])


def _bucket_table(plan: OwnershipPlan) -> list[str]:
    """Return one line a bucket, below a line of titles."""
    is_cut = np.bincount(plan.pieces.matrix, minlength=len(plan.owner)) > 1
    matrices = np.bincount(plan.matrix_bucket, minlength=len(plan.buckets))
    cut = np.bincount(plan.matrix_bucket[is_cut], minlength=len(plan.buckets))
    titles = "bucket child chunk tied params matrices cut elements row padding".split()
    rows = [titles]
    for bucket in plan.buckets:
        numel = sum(plan.params[index].numel for index in bucket.params)
        rows.append(
            [
                str(bucket.index),
                bucket.child,
                str(bucket.chunk),
                bucket.tied or "-",
                str(len(bucket.params)),
                str(matrices[bucket.index]),
                str(cut[bucket.index]),
                f"{numel:,}",
                f"{bucket.row_length:,}",
                f"{plan.dp * bucket.row_length - numel:,}",
            ]
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _summary(plan: OwnershipPlan, metrics: PlanMetrics) -> list[str]:
    """Return the lines below the buckets."""
    owned = np.bincount(plan.owner, minlength=plan.dp * plan.tp)
    return [
        f"padding         {metrics.padding:,} elements ({metrics.padding_fraction:.3%})",
        f"Newton-Schulz   busiest rank {metrics.ns_makespan_over_bound:.3f} of the bound, "
        f"longest-first {metrics.ns_makespan_lpt_over_bound:.3f}",
        f"matrices        {owned.min()} to {owned.max()} a rank, "
        f"{metrics.matrices_whole_fraction:.1%} whole in a row; "
        f"shortest row over largest matrix {metrics.row_over_largest:.2f}",
        f"exchange        {metrics.exchange_busiest:.3%} of the busiest rank's reduce-scatter and "
        f"all-gather (limit {metrics.exchange_limit:.3%}), at most {metrics.max_peers} peers",
        f"states          {metrics.state_bytes / 2**20:,.1f} MiB a rank, "
        f"{metrics.memory_over_ideal:.4f} of an even share",
    ]
