"""What one rank does with an example: save, or load and look."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing import CheckpointWarning, load, save, wait
from megatron_lw.dist_checkpointing.verify import verify
from megatron_lw.optimizer.held import held_buckets
from tests.distributed.checkpoint_cases import Layout
from tests.properties.checkpoint_strategies import Example


def save_one(root: Path, example: Example) -> int:
    """Save; returns how many buckets this rank has."""
    half = example.saved
    made = Layout(half.sizes, optimizer=example.optimizer, table=example.table, **half.options)
    made.fill(num_steps=7)
    extra = {"rank": made.groups.world.rank, "all": [1, None]}
    options = {"step": 7, "background": example.background}
    directory = save(root, made.ddp, made.optimizer, extra=extra, **options)
    if example.background:
        assert wait(made.optimizer) == directory
    if made.groups.world.rank == 0:
        verify(directory)
    return len(made.optimizer.runtime.buckets)


def load_one(root: Path, example: Example) -> list[str]:
    """Load into garbage; returns what is not as it must be."""
    half = example.loaded
    made = Layout(half.sizes, optimizer=example.optimizer, table=example.table, **half.options)
    for held in held_buckets(made.optimizer.runtime):
        rows = [held.master.row] if example.weights_only else list(held.rows.values())
        for row in rows:
            row.fill_(float("nan"))
    with torch.no_grad():
        for param in made.model.parameters():
            param.fill_(float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        loaded = load(root, made.ddp, made.optimizer, weights_only=example.weights_only)
    problems = made.problems(states=not example.weights_only)
    steps = {child.num_steps for child in made.optimizer.runtime.children}
    if steps - {0 if example.weights_only else 7}:
        problems.append(f"step counts {steps}")
    if loaded.extra["all"] != [1, None] or loaded.extra_of_rank(0)["rank"] != 0:
        problems.append(f"extra {loaded.extra}")
    made.optimizer.check(collectives=True)
    return problems  # a rank without rows says so, see `Layout.problems`
