"""Models divided over tensor, expert and pipeline ranks, with the answer of one whole process.

A `Spec` describes one logical parameter. Every rank builds its own part, gets its own part of
chosen global gradients, and the reference steps the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import megatron_lw
from tests.distributed.cases import GRADS, Bag, Run, initial_values
from tests.reference import Reference, Settings


@dataclass(frozen=True)
class Spec:
    """One logical parameter.

    Attributes:
        shape: of the whole.
        tp_dim: dimension divided over (expert) tensor parallelism.
        blocks: fused matrices along dimension 0, each divided by itself.
        expert: its number, if it belongs to one expert.
        stage: the pipeline stage that has it; None: all (tied) stages.
        tied: name of the logical weight.
        sequence_parallel: each tensor-parallel rank has a part of the gradient's sum.
        keep_fp32: a replica over all ranks of the stage; every one has a gradient of its own.
        embedding: stepped element by element.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = None
    blocks: tuple[int, ...] | None = None
    expert: int | None = None
    stage: int | None = 0
    tied: str | None = None
    sequence_parallel: bool = False
    keep_fp32: bool = False
    embedding: bool = False


Specs = dict[str, Spec]


def part_of(spec: Spec, whole: torch.Tensor, tp_size: int, tp_rank: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a tensor of the parameter's global shape."""
    if spec.tp_dim is None or tp_size == 1:
        return whole
    blocks = spec.blocks if spec.blocks and spec.tp_dim == 0 else (whole.shape[spec.tp_dim],)
    parts = [b.chunk(tp_size, spec.tp_dim)[tp_rank] for b in whole.split(list(blocks), spec.tp_dim)]
    return torch.cat(parts, spec.tp_dim).contiguous()


def mine(specs: Specs, groups: megatron_lw.ParallelGroups) -> dict[str, torch.Size]:
    """Which parameters this rank has a part of, by name, with its (tp size, tp rank)."""
    experts = sum(1 for n, s in specs.items() if s.expert is not None) and (
        max(s.expert for s in specs.values() if s.expert is not None) + 1
    )
    found = {}
    for name, spec in specs.items():
        if spec.stage is not None and spec.stage != groups.pp.rank and groups.pp.size > 1:
            continue
        if spec.expert is not None:
            per_rank = experts // groups.ep.size
            if spec.expert // per_rank != groups.ep.rank:
                continue
            found[name] = groups.expert_tp
        elif spec.keep_fp32:
            found[name] = megatron_lw.ParallelGroups.single().tp
        else:
            found[name] = groups.tp
    return found


def rank_grad(
    name: str, spec: Spec, kind: str, specs: Specs, groups: megatron_lw.ParallelGroups, step: int
) -> torch.Tensor:
    """The gradient that this rank computes for its part.

    Dense: data-parallel rank d has gradient d, the same on all tensor-parallel ranks. Sequence
    parallel: each (d, t) has a gradient of its own, to be summed over t. Experts: each rank of the
    expert data-parallel group has one. FP32 replicas: each rank of the stage has one. Tied copies:
    each stage has one, to be summed.
    """
    shapes = {n: s.shape for n, s in specs.items()}
    index = groups.dp.rank
    if spec.sequence_parallel:
        index = 100 + groups.dp.rank * groups.tp.size + groups.tp.rank
    if spec.expert is not None:
        index = 200 + groups.expert_dp.rank
    if spec.keep_fp32:
        index = 300 + groups.replicas.rank
    if spec.tied:
        index = 400 + 10 * groups.pp.rank + groups.dp.rank
    return GRADS[kind](shapes, index, step)[name]


def reference_grad(
    name: str, spec: Spec, kind: str, specs: Specs, sizes: dict[str, int], step: int
) -> torch.Tensor:
    """The gradient of one process over all tokens."""
    shapes = {n: s.shape for n, s in specs.items()}
    dp, tp = sizes["dp"], sizes["tp"]
    if spec.sequence_parallel:
        indices = [[100 + d * tp + t for d in range(dp)] for t in range(tp)]
        return sum(
            sum(GRADS[kind](shapes, i, step)[name] for i in column) / dp for column in indices
        )
    if spec.expert is not None:
        ranks = [200 + i for i in range(sizes["expert_dp"])]
        return sum(GRADS[kind](shapes, i, step)[name] for i in ranks) / dp
    if spec.keep_fp32:
        ranks = [300 + i for i in range(dp * tp)]
        return sum(GRADS[kind](shapes, i, step)[name] for i in ranks) / (dp * tp)
    if spec.tied:
        stages = range(sizes["pp"]) if sizes["pp"] > 1 else range(1)
        return sum(
            sum(GRADS[kind](shapes, 400 + 10 * s + d, step)[name] for d in range(dp)) / dp
            for s in stages
        )
    return sum(GRADS[kind](shapes, d, step)[name] for d in range(dp)) / dp


def train_parallel(
    specs: Specs,
    config: dict[str, Any],
    sizes: dict[str, int],
    *,
    steps: int = 2,
    kind: str = "integer",
    bucket_size: int | None = None,
    ddp_config: dict[str, Any] | None = None,
) -> Run:
    """Train this rank's part of the model; the last weights and counted facts come back."""
    groups = megatron_lw.ParallelGroups.create(**sizes)
    values = initial_values({n: s.shape for n, s in specs.items()})
    parts = {
        name: part_of(specs[name], values[name], tensor.size, tensor.rank)
        for name, tensor in mine(specs, groups).items()
    }
    model = Bag({}, torch.float32)
    for name, value in parts.items():
        spec = specs[name]
        param = nn.Parameter(value.clone())
        megatron_lw.annotate(
            param,
            tp_dim=spec.tp_dim,
            blocks=spec.blocks,
            expert=spec.expert is not None,
            tied=spec.tied,
            sequence_parallel=spec.sequence_parallel,
            keep_fp32=spec.keep_fp32,
            embedding=spec.embedding,
        )
        model.register_parameter(name, param)
    settings = megatron_lw.DDPConfig(bucket_size=bucket_size, **(ddp_config or {}))
    ddp = megatron_lw.DistributedDataParallel(model, groups, settings)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**config), [ddp])
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        grads = {}
        for name, tensor in mine(specs, groups).items():
            whole = rank_grad(name, specs[name], kind, specs, groups, step)
            grads[name] = part_of(specs[name], whole, tensor.size, tensor.rank)
        ddp(grads).backward() if grads else None
        run.results.append(optimizer.step())
        run.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    children = optimizer.runtime.children
    run.facts = {
        "tensor": {n: (t.size, t.rank) for n, t in mine(specs, groups).items()},
        "orthogonalised": sum(getattr(child, "num_orthogonalised", 0) for child in children),
        "sent": groups.tp_dp.traffic.nbytes["all_to_all"],
        "calls": {
            f: dict(getattr(groups, f).traffic.calls)
            for f in ("dp", "tp_dp", "expert_dp", "expert_tp_dp", "grad_stats", "replicas")
        },
        "sizes": {f: getattr(groups, f).size for f in ("dp", "tp", "expert_dp", "pp")},
    }
    return run


def reference_parallel(
    specs: Specs,
    config: dict[str, Any],
    sizes: dict[str, int],
    *,
    steps: int = 2,
    kind: str = "integer",
) -> tuple[dict[str, torch.Tensor], list[tuple[float, int]]]:
    """Masters after the last step, and norm and zeros of each step, by the whole process."""
    settings = {}
    for name, spec in specs.items():
        vector = len(spec.shape) == 1
        matrix = len(spec.shape) == 2 and not spec.embedding and config["optimizer"] == "muon"
        settings[name] = Settings(
            lr=config["lr"],
            weight_decay=0.0 if vector else config["weight_decay"],
            matrix=spec.shape if matrix else None,
        )
    values = initial_values({n: s.shape for n, s in specs.items()})
    reference = Reference(values, settings, clip_grad=config["clip_grad"])
    stats = []
    for step in range(steps):
        grads = {
            name: reference_grad(name, spec, kind, specs, sizes, step)
            for name, spec in specs.items()
        }
        stats.append(reference.step(grads))
    return reference.masters, stats
