"""Runs a benchmark on several ranks, each a process with gloo and one thread."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Measure = Callable[..., dict[str, object]]


def measure_on(
    ranks: int, measure: Measure, *args: object, directory: Path | None = None
) -> dict[str, object]:
    """What rank 0 measured.

    Args:
        ranks: how many processes.
        measure: a top-level function, called as `measure(folder, *args)` on every rank with
            `torch.distributed` initialised; `folder` is empty, and deleted afterwards.
        args: for it.
        directory: where the folder is made; it exists.
    """
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        mp.spawn(_worker, (ranks, folder, measure, args), nprocs=ranks)
        report: dict[str, object] = json.loads((Path(folder) / "result.json").read_text())
        return report


def _worker(rank: int, ranks: int, folder: str, measure: Measure, args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    files = Path(folder) / "files"
    files.mkdir(exist_ok=True)
    report = measure(files, *args)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
