"""Tensor parallelism in one run: one owner a matrix against every rank computing every matrix.

    python benchmarks/parallel.py [--quick] [--json FILE]

Two tensor-parallel ranks hold the halves of equal matrices, of every other one by rows and of the
rest by columns, and step them in turn, round after round:

- owner: ours; the shards of a matrix meet at one rank, which orthogonalises it, and updates return;
- everywhere: an all-gather of all shards, the whole iteration of every matrix on every rank, and
  each rank keeps its own part; nothing returns.

Both use the same kernels, bf16. Reduce, statistics and agreement are left out on both sides, all
other communication counts. The slower rank counts, and the ratio is the median of the rounds' own,
so that other work on the machine disturbs it less. Bytes are those that the library counts where it
calls a collective.
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
from megatron_lw.distributed.collectives import all_gather
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.children.coefficients import resolve_coefficients
from megatron_lw.optimizer.children.muon import scale_factor
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from ranks import measure_on

RANKS = 2
MATRICES = 12
ROWS, COLUMNS = 512, 1024
LR, DECAY, MOMENTUM = 1e-3, 0.1, 0.95
EXCHANGE_NBYTES = 2  # of an element: the iteration is in bf16
PROMISED_RATIO = 0.6


def tp_dim(number: int) -> int:
    """Along which dimension matrix `number` is divided."""
    return number % 2


def whole(number: int) -> torch.Tensor:
    """Matrix `number` before training."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, COLUMNS, generator=generator) * 0.02


class Shards(nn.Module):
    """This rank's halves of all matrices."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.matrices = nn.ParameterList()
        for number in range(MATRICES):
            dim = tp_dim(number)
            shard = whole(number).chunk(group.size, dim)[group.rank].contiguous()
            self.matrices.append(megatron_lw.annotate(nn.Parameter(shard.bfloat16()), tp_dim=dim))


class Everywhere:
    """Every rank orthogonalises every matrix whole and keeps its own part of the update."""

    def __init__(self, model: Shards, group: Group) -> None:
        self.group = group
        self.params = list(model.matrices)
        self.masters = [param.detach().float() for param in self.params]
        self.momenta = [torch.zeros_like(master) for master in self.masters]
        numel = sum(master.numel() for master in self.masters)
        self.row = torch.empty(numel, dtype=torch.bfloat16)
        self.arrived = torch.empty(group.size * numel, dtype=torch.bfloat16)
        self.matrices = [torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16) for _ in self.params]
        self.iterate = NewtonSchulz(coefficients=resolve_coefficients("simple", 5))

    def step(self, grads: list[torch.Tensor]) -> None:
        """One step of Muon, then the cast to the weights."""
        numels = [master.numel() for master in self.masters]
        for momentum, grad, place in zip(self.momenta, grads, self.row.split(numels), strict=True):
            momentum.lerp_(grad, 1 - MOMENTUM)
            place.copy_(momentum.view(-1))
        all_gather(self.arrived, self.row, self.group)
        for rank, row in enumerate(self.arrived.chunk(self.group.size)):
            for number, shard in enumerate(row.split(numels)):
                place = self.matrices[number].chunk(self.group.size, tp_dim(number))[rank]
                place.copy_(shard.view(place.shape))
        self.iterate.orthogonalise(self.matrices, self.matrices)
        scale = scale_factor(ROWS, COLUMNS, "shape_scaling")
        for number, master in enumerate(self.masters):
            update = self.matrices[number].chunk(self.group.size, tp_dim(number))[self.group.rank]
            master.mul_(1 - LR * DECAY).add_(update, alpha=-LR * scale)
            self.params[number].data.copy_(master)


def timed(action: Callable[[], object]) -> float:
    """Seconds, from a common start to the end of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return largest(time.perf_counter() - start)[0]


def largest(*numbers: float) -> list[float]:
    """The largest of each number over the ranks."""
    found = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def sent(groups: megatron_lw.ParallelGroups) -> int:
    """Bytes that this rank has sent in exchanges: of rows over `dp`, of shards over `tp`."""
    used = (groups.dp, groups.tp, groups.tp_dp)
    return sum(group.traffic.nbytes["all_to_all"] for group in used)


def measure_rank(folder: Path, rounds: int) -> dict[str, object]:
    """All that one rank measures."""
    groups = megatron_lw.ParallelGroups.create(tensor=RANKS)
    ddp = megatron_lw.DistributedDataParallel(Shards(groups.tp), groups)
    config = megatron_lw.OptimizerConfig(
        optimizer="muon", lr=LR, weight_decay=DECAY, bf16=True, clip_grad=0.0,
        muon_momentum=MOMENTUM, muon_coefficient_type="simple", muon_scale_mode="shape_scaling",
    )  # fmt: skip
    ours = megatron_lw.get_megatron_optimizer(config, [ddp])
    model = Shards(groups.tp)
    everywhere = Everywhere(model, groups.tp.renamed("everywhere"))
    params = list(ddp.module.matrices)
    torch.manual_seed(groups.world.rank)  # each rank has gradients of its own shards
    grads = [torch.randn(param.shape) for param in params]

    seconds: dict[str, list[float]] = {"owner": [], "everywhere": []}
    before = sent(groups)
    for _ in range(rounds + 1):
        ours.zero_grad()
        for param, grad in zip(params, grads, strict=True):
            param.main_grad.copy_(grad)
        whole_step = timed(ours.step)
        spent = ours.timings()
        outside = largest(-sum(spent[stage] for stage in ("reduce", "stats", "agree")))
        seconds["owner"].append(whole_step + outside[0])
        seconds["everywhere"].append(timed(lambda: everywhere.step(grads)))
    facts = largest(
        (sent(groups) - before) / (rounds + 1),
        sum(param.numel() for param in params) * EXCHANGE_NBYTES,
        *(float((a - b).detach().abs().max()) for a, b in zip(params, model.matrices, strict=True)),
    )
    orthogonalised = torch.tensor([child.num_orthogonalised for child in ours.runtime.children])
    dist.all_reduce(orthogonalised)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    ratios = [a / b for a, b in list(zip(*seconds.values(), strict=True))[1:]]
    return {
        "seconds": medians,
        "ratio": statistics.median(ratios),
        "stages": ours.timings(),
        "sent_nbytes": facts[0],
        "promised_nbytes": 2 * (RANKS - 1) / RANKS * facts[1],
        "difference": max(facts[2:]),
        "orthogonalised": int(orthogonalised.sum()),
    }


def main() -> None:
    """Measure, print one table, optionally write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    report = measure_on(RANKS, measure_rank, 3 if options.quick else 11)
    print(
        f"step of {MATRICES} matrices of {ROWS}x{COLUMNS} over {RANKS} tensor-parallel ranks, "
        "1 thread each, bf16:"
    )
    for name, value in report["seconds"].items():  # type: ignore[attr-defined]
        print(f"  {name:<12} {1e3 * value:8.1f} ms")
    nbytes, promise = float(str(report["sent_nbytes"])), float(str(report["promised_nbytes"]))
    print(f"  owner / everywhere   {report['ratio']:.3f}  (promise <= {PROMISED_RATIO})")
    print(
        f"  sent by the busiest rank, both ways {nbytes / 1e6:.2f} MB: {nbytes / promise:.3f} of "
        "(T-1)/T of its matrix bytes each way (promise <= 1)"
    )
    print(f"  orthogonalised {report['orthogonalised']} times (promise {MATRICES})")
    print(f"  largest difference of a weight {report['difference']:.1e}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
