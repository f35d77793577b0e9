"""Small models whose gradients are chosen, and runs of them under the library on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw.distributed.gather import Publisher
from tests.reference import Reference, Settings

Shapes = dict[str, tuple[int, ...]]


class Bag(nn.Module):
    """Named parameters without structure; `forward` makes each one's gradient what is asked for."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype | dict[str, torch.dtype], seed: int = 0):
        super().__init__()
        for name, value in initial_values(shapes, seed).items():
            kind = dtype[name] if isinstance(dtype, dict) else dtype
            self.register_parameter(name, nn.Parameter(value.to(kind)))

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros(())
        for name, param in self.named_parameters():
            if name in grads:
                loss = loss + (param.float() * grads[name]).sum()
        return loss


def initial_values(shapes: Shapes, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same values on every rank and in the reference."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def integer_grads(shapes: Shapes, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Small integers, a twelfth of them zero: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randint(-6, 7, shape, generator=generator).float()
        for name, shape in shapes.items()
    }


def power_law_grads(shapes: Shapes, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Matrices whose singular values fall as 1/k, as trained models' gradients do."""
    generator = torch.Generator().manual_seed(2000 * step + rank)
    grads = {}
    for name, shape in shapes.items():
        g = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            u, s, v = torch.linalg.svd(g, full_matrices=False)
            g = u @ torch.diag(s.max() / torch.arange(1, len(s) + 1)) @ v
        grads[name] = g
    return grads


GRADS = {"integer": integer_grads, "power_law": power_law_grads}


def mean_grads(kind: str, shapes: Shapes, ranks: int, step: int) -> dict[str, torch.Tensor]:
    """What the ranks' gradients average to: the sum in rank order, divided by their number."""
    per_rank = [GRADS[kind](shapes, rank, step) for rank in range(ranks)]
    return {name: sum(g[name] for g in per_rank) / ranks for name in shapes}


@dataclass
class Run:
    """What one rank saw."""

    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    results: list[tuple[bool, float | None, int | None]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def build(
    shapes: Shapes,
    config: dict[str, Any],
    *,
    dtype: torch.dtype | dict[str, torch.dtype] = torch.float32,
    bucket_size: int | None = None,
    tags: dict[str, dict[str, Any]] | None = None,
    groups: megatron_lw.ParallelGroups | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[megatron_lw.DistributedDataParallel, megatron_lw.LayerWiseDistributedOptimizer]:
    """A wrapped `Bag` and its optimizer."""
    groups = groups or megatron_lw.ParallelGroups.create()
    model = Bag(shapes, dtype, seed)
    for name, tag in (tags or {}).items():
        megatron_lw.annotate(model.get_parameter(name), **tag)
    ddp = megatron_lw.DistributedDataParallel(
        model, groups, megatron_lw.DDPConfig(bucket_size=bucket_size)
    )
    settings = megatron_lw.OptimizerConfig(**config)
    return ddp, megatron_lw.get_megatron_optimizer(settings, [ddp], pg_collection=groups, **options)


def train(
    shapes: Shapes,
    config: dict[str, Any],
    *,
    steps: int = 3,
    kind: str = "integer",
    dtype: torch.dtype | dict[str, torch.dtype] = torch.float32,
    bucket_size: int | None = None,
    **options: Any,
) -> Run:
    """Train a few steps on this rank."""
    ddp, optimizer = build(shapes, config, dtype=dtype, bucket_size=bucket_size, **options)
    group = ddp.groups.dp
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        ddp(GRADS[kind](shapes, group.rank, step)).backward()
        run.results.append(optimizer.step())
        run.weights.append({n: p.detach().clone() for n, p in ddp.module.named_parameters()})
    plans = optimizer.runtime.plans.values()
    run.facts = {
        "buckets": len(optimizer.runtime.buckets),
        "empty_rows": [not b.layout.slots[group.rank] for b in optimizer.runtime.buckets],
        "matrices": sum(len(plan.owner) for plan in plans),
        "pieces": sum(len(plan.pieces.matrix) for plan in plans),
        "calls": {name: dict(g.traffic.calls) for name, g in _groups(ddp.groups).items()},
        "nbytes": {name: dict(g.traffic.nbytes) for name, g in _groups(ddp.groups).items()},
    }
    return run


def _groups(groups: megatron_lw.ParallelGroups) -> dict[str, Any]:
    return {"dp": groups.dp, "tp_dp": groups.tp_dp, "grad_stats": groups.grad_stats}


def reference_run(
    shapes: Shapes,
    settings: dict[str, Settings],
    *,
    ranks: int,
    steps: int = 3,
    kind: str = "integer",
    clip_grad: float = 0.0,
    seed: int = 0,
    values: dict[str, torch.Tensor] | None = None,
) -> tuple[list[dict[str, torch.Tensor]], list[tuple[float, int]]]:
    """The masters after each step and (norm, zeros) of each, by the plain reference."""
    reference = Reference(values or initial_values(shapes, seed), settings, clip_grad=clip_grad)
    masters, stats = [], []
    for step in range(steps):
        stats.append(reference.step(mean_grads(kind, shapes, ranks, step)))
        masters.append({name: master.clone() for name, master in reference.masters.items()})
    return masters, stats


def master_parts(publishers: Iterable[Publisher]) -> list[tuple[str, int, torch.Tensor]]:
    """Name, first element and values of every part of a parameter in this rank's rows."""
    return [
        (name, slot.param_start, publisher.master.row[slot.row_start :][: slot.numel].clone())
        for publisher in publishers
        for name, slot in publisher.bucket.row_slots()
    ]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())
