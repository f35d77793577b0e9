"""Models whose owners hold states that are no rows, saved in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_lw.dist_checkpointing import save
from tests.distributed import checkpoint_cases as cases

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"whole_optimizer": "torch.optim:AdamW"},
    "normuon": {},
}


def save_owned(root: Path, sizes: dict[str, int], optimizer: str) -> str:
    """Take a step, so that owners have states, and save; returns the directory."""
    made = cases.Layout(sizes, optimizer=optimizer, **SETTINGS[optimizer])
    made.fill(num_steps=0)
    for param in made.model.parameters():
        if param.requires_grad:
            param.main_grad.copy_(torch.ones(param.shape))
    made.optimizer.step()
    path = save(root, made.ddp, made.optimizer, step=1)
    made.groups.destroy()
    return str(path)
