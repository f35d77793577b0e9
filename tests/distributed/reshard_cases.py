"""A model whose matrices an optimizer of torch's kind steps whole, saved in several layouts."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_lw.dist_checkpointing import save
from tests.distributed import checkpoint_cases as cases


def save_whole(root: Path, sizes: dict[str, int]) -> str:
    """Take a step, so that owners have states, and save; returns the directory."""
    made = cases.Layout(sizes, optimizer="whole", whole_optimizer="torch.optim:AdamW")
    made.fill(num_steps=0)
    for param in made.model.parameters():
        if param.requires_grad:
            param.main_grad.copy_(torch.ones(param.shape))
    made.optimizer.step()
    path = save(root, made.ddp, made.optimizer, step=1)
    made.groups.destroy()
    return str(path)
