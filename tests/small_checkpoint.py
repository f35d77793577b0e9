"""A checkpoint that one process saves: bf16 weights whose masters bf16 cannot hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import megatron_lw
from megatron_lw.dist_checkpointing import save
from megatron_lw.dist_checkpointing.directory import MANIFEST, read_manifest
from megatron_lw.dist_checkpointing.manifest_json import to_bytes
from megatron_lw.optimizer.held import held_buckets

STEP = 12
SHAPES = {"words.weight": (10, 6), "layers.0.w": (8, 6), "layers.1.w": (5, 4), "layers.1.b": (7,)}
STORED_ROWS = 12
FROZEN = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
CALLS = torch.tensor([3, 1 << 60])


class Small(nn.Module):
    """A vocabulary of 10 words in 12 rows, two matrices, a vector, a frozen weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(STORED_ROWS, 6, dtype=torch.bfloat16)
        megatron_lw.annotate(
            self.words.weight, logical_rows=10, tp_dim=0, tied="words", embedding=True
        )
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        self.layers[0].register_parameter("w", _zeros(8, 6))
        self.layers[1].register_parameter("w", _zeros(5, 4))
        self.layers[1].register_parameter("b", _zeros(7))
        self.frozen = nn.Parameter(FROZEN.clone(), requires_grad=False)
        self.register_buffer("calls", CALLS.clone())


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))


def master(name: str) -> torch.Tensor:
    """The logical master: the index of the element and a little, which bf16 rounds away."""
    shape = SHAPES[name]
    base = 100 * list(SHAPES).index(name) + 1
    return (torch.arange(math.prod(shape)) + base + 1e-3).view(shape)


def save_small(root: Path, extra: dict[str, object] | None = None) -> Path:
    """Save such a model; returns the checkpoint's directory."""
    groups = megatron_lw.ParallelGroups.single()
    ddp = megatron_lw.DistributedDataParallel(
        Small(), groups, megatron_lw.DDPConfig(bucket_size=50)
    )
    config = megatron_lw.OptimizerConfig(optimizer="muon", lr=0.25, bf16=True)
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp])
    for held in held_buckets(optimizer.runtime):
        for name, slot in held.bucket.row_slots():
            flat = master(name).view(-1)[slot.param_start : slot.param_start + slot.numel]
            for scale, row in enumerate(held.rows.values()):
                start = slot.row_start
                row[start : start + flat.numel()] = flat * 10**scale
        held.child.num_steps = STEP
    return save(root, ddp, optimizer, extra=extra or {"samples": 96}, step=STEP)


def add_copy(directory: Path, name: str) -> None:
    """Give the tied weight of a saved checkpoint a second copy, as two pipeline stages would."""
    manifest = read_manifest(directory)
    params = tuple(
        replace(param, names=(*param.names, name)) if param.name == "tied/words" else param
        for param in manifest.params
    )
    assert params != manifest.params
    (directory / MANIFEST).write_bytes(to_bytes(replace(manifest, params=params)))
