"""Saving and loading a checkpoint, against plain file writes and torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--quick] [--device cuda] [--json FILE] [--directory DIR]

Two ranks hold fp32 masters and the two states of Adam, 2 GB in all, and in turn, round after round
and the first two in either order,

- plain: write the same bytes to a file each, 4 MiB at a time, and flush it: no checksum, no names;
- ours: `save`: agreement of the ranks, checksums, manifest, flushes, commit;
- torch: `torch.distributed.checkpoint.save` of the same tensors, each rank its own;
- background: `save(background=True)`, of which the time until it returns counts.

Loads follow, each of what the same side has just saved, so from memory where the system keeps what
it has written: ours checks every chunk and publishes the weights (a gather), torch's does neither.
The slower rank counts, ratios are medians of the rounds' own. Memory is what the process holds at
most during a save beyond what it held before (Linux). On a GPU there is one rank, with 2 GB in all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import megatron_lw
from megatron_lw.dist_checkpointing import load, save, wait
from megatron_lw.optimizer.held import held_buckets
from ranks import measure_on

RANKS = {"cpu": 2, "cuda": 1}
LAYERS, WIDTH, HEIGHT = 42, 1024, 4096  # 12 bytes an element
QUICK_LAYERS = 4
CHUNK_NBYTES = 4 << 20
PROMISED_WRITE, PROMISED_FAST_WRITE = 0.90, 0.75
PROMISED_STALL = 0.10
PROMISED_MEMORY = 64 << 20


class Bench:
    """One rank: its model, its tensors, and the ways to save and load them."""

    def __init__(self, layers: int, directory: Path, device: str) -> None:
        self.directory = directory
        self.rank = dist.get_rank()
        model = nn.ParameterDict({str(i): torch.zeros(HEIGHT, WIDTH) for i in range(layers)})
        self.ddp = megatron_lw.DistributedDataParallel(
            model.bfloat16().to(device), megatron_lw.ParallelGroups.create()
        )
        config = megatron_lw.OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True)
        self.optimizer = megatron_lw.get_megatron_optimizer(config, [self.ddp])
        held = held_buckets(self.optimizer.runtime)
        torch.manual_seed(self.rank)
        rows = {f"{b}/{key}": row for b, each in enumerate(held) for key, row in each.rows.items()}
        self.rows = {f"{self.rank}/{name}": row.normal_() for name, row in rows.items()}
        self.nbytes = sum(row.nbytes for row in self.rows.values())

    def save_plain(self) -> None:
        """The bytes, and nothing else."""
        descriptor = os.open(self.directory / f"plain-{self.rank}", os.O_WRONLY | os.O_CREAT)
        for row in self.rows.values():
            view = row.cpu().view(torch.uint8).numpy().data
            for start in range(0, view.nbytes, CHUNK_NBYTES):
                part = view[start : start + CHUNK_NBYTES]
                while part.nbytes:
                    part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def save_ours(self, *, background: bool = False) -> None:
        """With this library."""
        save(self.directory / "ours", self.ddp, self.optimizer, step=1, background=background)

    def save_torch(self) -> None:
        """With torch.distributed.checkpoint."""
        dcp.save(self.rows, checkpoint_id=self.directory / "torch")

    def load_ours(self) -> None:
        """Into the same optimizer."""
        load(self.directory / "ours", self.ddp, self.optimizer)

    def load_torch(self) -> None:
        """Into the same tensors."""
        dcp.load(self.rows, checkpoint_id=self.directory / "torch")

    def tidy(self) -> None:
        """Remove what was saved, so that every save writes new files."""
        dist.barrier()
        if self.rank == 0:
            for path in self.directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        dist.barrier()


def timed(action: Callable[[], object]) -> float:
    """Seconds, from a common start to the end of the slower rank."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    action()
    return largest(time.perf_counter() - start)


def largest(number: float) -> float:
    """The largest over the ranks."""
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def extra_memory(action: Callable[[], object]) -> float:
    """Bytes that an action adds to what the process holds, at most; nan where it is not told."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
    except OSError:
        action()
        return float("nan")
    action()
    return largest(_status("VmHWM") - before)


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) << 10


def measure_rank(folder: Path, layers: int, rounds: int, device: str) -> dict[str, object]:
    """All that one rank measures; the same on every rank."""
    bench = Bench(layers, folder, device)
    seconds: dict[str, list[float]] = {}

    def lap(name: str, action: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(timed(action))

    memory = []

    def save_plain() -> None:
        lap("plain", bench.save_plain)
        bench.tidy()

    def save_ours() -> None:
        memory.append(extra_memory(lambda: lap("ours", bench.save_ours)))
        lap("ours load", bench.load_ours)
        bench.tidy()

    for number in range(rounds + 1):
        for each in (save_plain, save_ours) if number % 2 else (save_ours, save_plain):
            each()
        lap("torch", bench.save_torch)
        lap("torch load", bench.load_torch)
        bench.tidy()
        lap("stall", lambda: bench.save_ours(background=True))
        lap("rest", lambda: wait(bench.optimizer))
        bench.tidy()
    kept = {name: values[1:] for name, values in seconds.items()}  # the first round warms up

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(kept[a], kept[b], strict=True))

    return {
        "nbytes": bench.nbytes * dist.get_world_size(),
        "ranks": dist.get_world_size(),
        "seconds": {name: statistics.median(values) for name, values in kept.items()},
        "write": ratio("plain", "ours"),
        "save against torch": ratio("torch", "ours"),
        "load against torch": ratio("torch load", "ours load"),
        "stall": ratio("stall", "ours"),
        "memory": max(memory),
        "rounds": {"plain": kept["plain"], "ours": kept["ours"]},
    }


def show(report: dict[str, object]) -> None:
    """Print the numbers beside what is promised."""
    nbytes, seconds = float(str(report["nbytes"])), report["seconds"]
    print(f"{nbytes / 1e9:.2f} GB of masters and states, ranks: {report['ranks']}")
    for name, value in seconds.items():  # type: ignore[attr-defined]
        print(f"  {name:<12} {value:7.3f} s  {nbytes / value / 1e9:6.2f} GB/s")
    print(
        f"  plain / ours              {report['write']:.2f}  (promise >= {PROMISED_WRITE}, where "
        f"the disk outruns a core's checksum >= {PROMISED_FAST_WRITE})"
    )
    print(f"  torch / ours, save        {report['save against torch']:.2f}")
    print(f"  torch / ours, load        {report['load against torch']:.2f}")
    print(f"  stall / ours              {report['stall']:.3f}  (target <= {PROMISED_STALL})")
    mib = float(str(report["memory"])) / (1 << 20)
    print(f"  extra memory of a rank    {mib:.1f} MiB  (promise <= {PROMISED_MEMORY >> 20})")


def main() -> None:
    """Measure, print one table, optionally write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less data, for a first look")
    parser.add_argument(
        "--directory", type=Path, help="where to write, exists; default: for temporaries"
    )
    parser.add_argument("--device", default="cpu", choices=tuple(RANKS))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    layers = QUICK_LAYERS if options.quick else LAYERS
    rounds = 2 if options.quick else 8
    report = measure_on(
        RANKS[options.device],
        measure_rank,
        layers,
        rounds,
        options.device,
        directory=options.directory,
    )
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
