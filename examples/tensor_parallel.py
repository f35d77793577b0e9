"""Tensor parallelism for the GPT of the examples, after it has been built whole.

Every rank draws the whole model from the same seed and keeps its part, so any number of ranks
starts from the same model. The two projections of a sub-layer are divided as in Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053): the first by output features, the second by input features,
with one all-reduce in each direction. Fused weights are divided block by block, so that a rank has
its share of the query, key and value heads, and of gate and up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import megatron_lw
from gpt import GPT
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group


class _SumGradient(torch.autograd.Function):
    """Identity forward; all-reduce over a tensor-parallel group backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        collectives.all_reduce(gradient, ctx.group)
        return gradient, None


class _SumOutput(torch.autograd.Function):
    """All-reduce over a tensor-parallel group forward; identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        collectives.all_reduce(x, group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class DividedLinear(nn.Module):
    """This rank's part of a linear layer without bias.

    Attributes:
        weight: this rank's rows (dimension 0) or columns (dimension 1).
    """

    def __init__(self, whole: nn.Linear, dimension: int, blocks: int, group: Group) -> None:
        """Keep this rank's part of `whole`, whose rows are `blocks` fused matrices of one size."""
        super().__init__()
        self.dimension = dimension
        self.group = group
        rows = whole.weight.shape[0] // blocks
        parts = whole.weight.detach().split(rows)
        mine = torch.cat([part.chunk(group.size, dimension)[group.rank] for part in parts])
        self.weight = nn.Parameter(mine.clone())
        megatron_lw.annotate(
            self.weight, tp_dim=dimension, blocks=(rows,) * blocks if blocks > 1 else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`; divided rows give this rank's features, divided columns the whole sum."""
        if self.dimension == 0:
            return functional.linear(_SumGradient.apply(x, self.group), self.weight)
        return _SumOutput.apply(functional.linear(x, self.weight), self.group)


def divide(model: GPT, group: Group) -> None:
    """Replace the matrices inside the blocks by this rank's parts, in place.

    Raises:
        ValueError: if the heads or the hidden features do not divide by the ranks.
    """
    if group.size == 1:
        return
    config = model.config
    if config.heads % group.size or 3 * config.width % group.size:
        raise ValueError(
            f"--tensor-parallel {group.size} must divide --heads {config.heads} and "
            f"3 x --width {config.width}"
        )
    for block in model.blocks:
        block.attention.qkv = DividedLinear(block.attention.qkv, 0, 3, group)
        block.attention.output = DividedLinear(block.attention.output, 1, 1, group)
        block.mlp.gate_up = DividedLinear(block.mlp.gate_up, 0, 2, group)
        block.mlp.down = DividedLinear(block.mlp.down, 1, 1, group)
