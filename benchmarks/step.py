"""The optimizer step, side by side in one run: ours on 2 ranks against the same step on every rank.

    python benchmarks/step.py [--quick] [--json FILE]

Three ways to step one model with the same reduced gradients, in turn, round after round:

- ours: masters spread over 2 ranks, matrices orthogonalised by their owners, cut ones exchanged,
  weights gathered (all communication included; reduce and statistics are left out on every side);
- replicated: every rank steps everything, with our own Newton-Schulz and AdamW kernels;
- torch: every rank steps everything with `torch.optim.Muon` and `torch.optim.AdamW`.

The slower rank counts; medians over the rounds are compared. State memory is measured from tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import megatron_lw
import newton_schulz
from megatron_lw.optimizer.children.adam_backends import TorchAdam
from megatron_lw.optimizer.children.coefficients import resolve_coefficients
from megatron_lw.optimizer.children.muon import scale_factor
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from ranks import measure_on

RANKS = 2
LR, DECAY, MOMENTUM = 1e-3, 0.1, 0.95
LAYERS = 6
SHAPES = {
    "qkv": (1024, 512),
    "proj": (512, 512),
    "fc1": (1024, 512),
    "fc2": (512, 1024),
    "gate": (256, 512),
}
VOCABULARY = 4096


class Model(nn.Module):
    """An embedding, 30 matrices of 256 to 1024 and the vectors of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 512, dtype=torch.bfloat16)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.ParameterDict(
                {n: torch.randn(s, dtype=torch.bfloat16) * 0.02 for n, s in SHAPES.items()}
            )
            layer["norm"] = torch.ones(512, dtype=torch.bfloat16)
            self.layers.append(layer)


class Replicated:
    """Every parameter stepped on this rank, with the library's own arithmetic."""

    def __init__(self, model: nn.Module) -> None:
        self.params = dict(model.named_parameters())
        self.masters = {n: p.detach().float() for n, p in self.params.items()}
        self.matrices = [n for n, p in self.params.items() if p.dim() == 2 and "embed" not in n]
        self.rest = [n for n in self.params if n not in set(self.matrices)]
        self.state = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        self.squares = {n: torch.zeros_like(self.masters[n]) for n in self.rest}
        self.iterate = NewtonSchulz(coefficients=resolve_coefficients("simple", 5))
        self.count = 0

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        """One step of Muon and Adam, then the cast to the weights."""
        self.count += 1
        by_shape: dict[torch.Size, list[str]] = {}
        for name in self.matrices:
            self.state[name].lerp_(grads[name], 1 - MOMENTUM)
            by_shape.setdefault(self.masters[name].shape, []).append(name)
        for shape, names in by_shape.items():
            updates = [self.state[n].bfloat16() for n in names]
            self.iterate.orthogonalise(updates, updates)
            for name, update in zip(names, updates, strict=True):
                self.masters[name].mul_(1 - LR * DECAY)
                scale = scale_factor(*shape, "shape_scaling")
                self.masters[name].add_(update, alpha=-LR * scale)
        lists = [[d[n] for n in self.rest] for d in (self.masters, grads, self.state, self.squares)]
        TorchAdam()(*lists, step=self.count, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for name, param in self.params.items():
            param.data.copy_(self.masters[name])


class TorchOptimizers:
    """`torch.optim.Muon` and `torch.optim.AdamW` on fp32 masters, then the cast to the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.params = dict(model.named_parameters())
        self.masters = {n: nn.Parameter(p.detach().float()) for n, p in self.params.items()}
        matrices = [m for n, m in self.masters.items() if m.dim() == 2 and "embed" not in n]
        rest = [m for n, m in self.masters.items() if m.dim() != 2 or "embed" in n]
        self.muon = torch.optim.Muon(
            matrices, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, nesterov=False
        )
        self.adam = torch.optim.AdamW(rest, lr=LR, weight_decay=0.0, fused=True)

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        """One step of both."""
        for name, master in self.masters.items():
            master.grad = grads[name]
        self.muon.step()
        self.adam.step()
        for name, param in self.params.items():
            param.data.copy_(self.masters[name].detach())


def state_nbytes(optimizer: megatron_lw.LayerWiseDistributedOptimizer) -> tuple[int, float]:
    """Bytes of masters and states on this rank, and those of all states divided by the ranks."""
    held = 0
    ideal = 0.0
    for publisher in optimizer.runtime.publishers:
        held += publisher.master.row.nbytes
    for child in optimizer.runtime.children:
        for bucket in range(child.num_buckets):
            held += sum(row.nbytes for row in child.state_rows(bucket).values())
    for route in optimizer.runtime.routing.routes:
        states = 1 + (1 if route.matrix is not None else 2)
        ideal += 4.0 * states * route.info.numel / RANKS
    return held, ideal


def timed(action: Callable[[], None]) -> float:
    """Seconds, from a common start to the end of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def measure_rank(folder: Path, rounds: int) -> dict[str, object]:
    """All that one rank measures."""
    groups = megatron_lw.ParallelGroups.create()
    ddp = megatron_lw.DistributedDataParallel(Model(), groups, megatron_lw.DDPConfig())
    config = megatron_lw.OptimizerConfig(
        optimizer="muon", lr=LR, weight_decay=DECAY, bf16=True, clip_grad=0.0,
        muon_momentum=MOMENTUM, muon_coefficient_type="simple", muon_scale_mode="shape_scaling",
    )  # fmt: skip
    ours = megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)
    replicated, theirs = Replicated(Model()), TorchOptimizers(Model())
    grads = {n: torch.randn(p.shape) for n, p in ddp.module.named_parameters()}
    mean = {n: g.clone() for n, g in grads.items()}

    def run_ours() -> None:
        ours.step()

    seconds: dict[str, list[float]] = {"ours": [], "replicated": [], "torch": []}
    for _ in range(rounds + 1):
        ours.zero_grad()
        for name, param in ddp.module.named_parameters():
            param.main_grad.copy_(grads[name])
        whole = timed(run_ours)
        spent = ours.timings()
        outside = torch.tensor([spent["reduce"] + spent["stats"]], dtype=torch.float64)
        dist.all_reduce(outside, dist.ReduceOp.MIN)
        seconds["ours"].append(whole - float(outside))
        seconds["replicated"].append(timed(lambda: replicated.step(mean)))
        seconds["torch"].append(timed(lambda: theirs.step(mean)))
    held, ideal = state_nbytes(ours)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "seconds": medians,
        "stages": ours.timings(),
        "over_replicated": medians["ours"] / medians["replicated"],
        "over_torch": medians["ours"] / medians["torch"],
        "state_nbytes": held,
        "state_over_ideal": held / ideal,
        "matrices": sum(len(plan.owner) for plan in ours.runtime.plans.values()),
    }


def main() -> None:
    """Measure, print one table, optionally write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    step = measure_on(RANKS, measure_rank, 3 if options.quick else 11)
    print(
        f"step of {step['matrices']} matrices of 256 to 1024, {RANKS} ranks, 1 thread each, bf16:"
    )
    for name, value in step["seconds"].items():  # type: ignore[attr-defined]
        print(f"  {name:<12} {1e3 * value:8.1f} ms")
    print(f"  ours / replicated  {step['over_replicated']:.3f}  (promise <= 0.60)")
    print(f"  ours / torch       {step['over_torch']:.3f}  (promise <= 0.55)")
    print(f"  state bytes / ideal {step['state_over_ideal']:.4f}  (promise <= 1.02)")
    iteration = newton_schulz.measure(quick=options.quick)
    print(newton_schulz.table(iteration))
    if options.json:
        options.json.write_text(json.dumps({"step": step, "newton_schulz": iteration}, indent=2))


if __name__ == "__main__":
    main()
