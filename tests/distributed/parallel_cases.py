"""Models divided over tensor, expert and pipeline ranks, with the answer of one whole process.

A `Spec` describes one logical parameter. Every rank builds its own part, gets its own part of
chosen global gradients, and the reference steps the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
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
        matrices, qkv, logical_rows, split_blocks: as `megatron_lw.annotate` has them.
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
    matrices: int | None = None
    qkv: tuple[int, ...] | None = None
    logical_rows: int | None = None
    split_blocks: bool = True

    @property
    def matrix(self) -> tuple[int, int] | None:
        """(rows, columns) of all its matrices together, if Muon steps it."""
        if len(self.shape) < 2 or self.embedding:
            return None
        rows = self.shape[0]
        if self.matrices and len(self.shape) == 3:
            rows *= self.shape[1]
        return rows, torch.Size(self.shape).numel() // rows

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The rows of each matrix, written out."""
        count = self.matrices or 1
        rows = self.matrix[0] // count
        used = self.logical_rows or rows
        one = [tuple(range(used))]
        if self.qkv:
            edges = [sum(self.qkv[:i]) for i in range(len(self.qkv) + 1)]
            group = edges[-1]
            one = [
                tuple(r for r in range(used) if low <= r % group < high)
                for low, high in pairwise(edges)
            ]
        if self.blocks:
            edges = [sum(self.blocks[:i]) for i in range(len(self.blocks) + 1)]
            one = [tuple(range(low, high)) for low, high in pairwise(edges)]
            one = one if self.split_blocks else [tuple(range(edges[-1]))]
        return tuple(tuple(r + n * rows for r in part) for n in range(count) for part in one)


Specs = dict[str, Spec]


def part_of(spec: Spec, whole: torch.Tensor, tp_size: int, tp_rank: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a tensor of the parameter's global shape."""
    if spec.tp_dim is None or tp_size == 1:
        return whole
    row_dim = 1 if spec.matrices and len(spec.shape) == 3 else 0
    blocks = spec.blocks if spec.blocks and spec.tp_dim == row_dim else ()
    blocks = [*blocks, whole.shape[spec.tp_dim] - sum(blocks)]
    parts = [b.chunk(tp_size, spec.tp_dim)[tp_rank] for b in whole.split(blocks, spec.tp_dim)]
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


def grad_of(name: str, kind: str, specs: Specs, index: int, step: int) -> torch.Tensor:
    """One parameter's chosen gradient, a copy; `index` tells apart who computed it."""
    shapes = tuple((n, s.shape) for n, s in specs.items())
    return _all_grads(kind, shapes, index, step)[name].clone()


@lru_cache(maxsize=16)
def _all_grads(kind: str, shapes: tuple[Any, ...], index: int, step: int) -> Any:
    """Those of all parameters, made once: a parameter's depends on the ones before it."""
    return GRADS[kind](dict(shapes), index, step)


def rank_grad(
    name: str, spec: Spec, kind: str, specs: Specs, groups: megatron_lw.ParallelGroups, step: int
) -> torch.Tensor:
    """The gradient that this rank computes for its part.

    Dense: data-parallel rank d has gradient d, the same on all tensor-parallel ranks. Sequence
    parallel: each (d, t) has a gradient of its own, to be summed over t. Experts: each rank of the
    expert data-parallel group has one. FP32 replicas: each rank of the stage has one. Tied copies:
    each stage has one, to be summed.
    """
    index = groups.dp.rank
    if spec.sequence_parallel:
        index = 100 + groups.dp.rank * groups.tp.size + groups.tp.rank
    if spec.expert is not None:
        index = 200 + groups.expert_dp.rank
    if spec.keep_fp32:
        index = 300 + groups.replicas.rank
    if spec.tied:
        index = 400 + 10 * groups.pp.rank + groups.dp.rank
    return _unpadded(spec, grad_of(name, kind, specs, index, step))


def _unpadded(spec: Spec, grad: torch.Tensor) -> torch.Tensor:
    """A gradient that does not reach declared rows of padding."""
    if spec.logical_rows is not None:
        grad[spec.logical_rows :] = 0.0
    return grad


def reference_grad(
    name: str, spec: Spec, kind: str, specs: Specs, sizes: dict[str, int], step: int
) -> torch.Tensor:
    """The gradient of one process over all tokens."""
    dp, tp = sizes["dp"], sizes["tp"]

    def sum_of(indices: list[int]) -> torch.Tensor:
        return sum(grad_of(name, kind, specs, index, step) for index in indices)

    if spec.sequence_parallel:
        columns = [[100 + d * tp + t for d in range(dp)] for t in range(tp)]
        return sum(sum_of(column) / dp for column in columns)
    if spec.expert is not None:
        return sum_of([200 + i for i in range(sizes["expert_dp"])]) / dp
    if spec.keep_fp32:
        return sum_of([300 + i for i in range(dp * tp)]) / (dp * tp)
    if spec.tied:
        stages = range(sizes["pp"]) if sizes["pp"] > 1 else range(1)
        return sum(sum_of([400 + 10 * s + d for d in range(dp)]) / dp for s in stages)
    return _unpadded(spec, sum_of(list(range(dp))) / dp)


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
            split_blocks=spec.split_blocks,
            qkv=spec.qkv,
            matrices=spec.matrices,
            logical_rows=spec.logical_rows,
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
    mode: str = "spectral",
) -> tuple[dict[str, torch.Tensor], list[tuple[float, int]]]:
    """Masters after the last step, and norm and zeros of each step, by the whole process."""
    settings = {}
    for name, spec in specs.items():
        vector = len(spec.shape) == 1
        muon = config["optimizer"] == "muon" and spec.matrix is not None
        settings[name] = Settings(
            lr=config["lr"],
            weight_decay=0.0 if vector else config["weight_decay"],
            matrix=spec.matrix if muon else None,
            parts=spec.parts if muon else None,
            scale_mode=mode,
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
