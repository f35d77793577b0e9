"""`save` over a storage in memory, cut off after any operation, and `load` of what is left."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import megatron_lw
from megatron_lw.dist_checkpointing import latest, load, save
from megatron_lw.dist_checkpointing.verify import verify
from tests.crash_storage import MemoryStorage, crashes

ROOT = Path("/runs/first")


def crash_everywhere(step: int, keep_last: int | None) -> tuple[list[str], dict[float, int]]:
    """Save step 1, then another with other weights; crash, load, compare.

    Returns:
        What was wrong, and how often which weight was found.
    """
    groups = megatron_lw.ParallelGroups.create()
    model = nn.Linear(5, 3)
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    config = megatron_lw.OptimizerConfig(optimizer="muon", lr=0.1)
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp])

    def put(storage: MemoryStorage, step: int, value: float) -> None:
        for param in model.parameters():
            param.data.fill_(value)
        optimizer.reload_model_params()
        extra = {"value": value, "generator": torch.get_rng_state()}
        save(ROOT, ddp, optimizer, None, extra, step=step, keep_last=keep_last, storage=storage)

    before = MemoryStorage()
    put(before, 1, 1.0)
    after = MemoryStorage(dict(before.names))
    put(after, step, 2.0)
    wrong: list[str] = []
    found = {1.0: 0, 2.0: 0}
    for moment, left in crashes(before, after.operations, random.Random(0), 2):
        loaded = load(ROOT, ddp, optimizer, storage=left)
        values = {float(x) for param in model.parameters() for x in param.detach().view(-1)}
        [value] = values if len(values) == 1 else [float("nan")]
        newest = latest(ROOT, left)
        if value != loaded.extra["value"] or loaded.step != (1 if value == 1.0 else step):
            wrong.append(f"{moment}: {values}, {loaded.extra['value']}, step {loaded.step}")
        if loaded.directory != newest or not verify(ROOT, storage=left).is_whole:
            wrong.append(f"{moment}: {newest} is not whole")
        found[value] = found.get(value, 0) + 1
    groups.destroy()
    return wrong, found
