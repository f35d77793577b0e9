"""Tensor and sequence parallelism for the GPT of the examples, after it has been built whole.

Every rank draws the whole model from the same seed and keeps its part, so any number of ranks
starts from the same model. The two projections of a sub-layer are divided as in Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053): the first by output features, the second by input features.
Fused weights are divided block by block, so that a rank has its share of the query, key and value
heads, and of gate and up. Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) divides
the residual stream between the sub-layers too, along the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import megatron_lw
from gpt import GPT, MLP
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from megatron_lw.distributed.sequence import gather_sequence, scatter_sequence

SEQUENCE = 1
"""The dimension of [batch, sequence, width] along which parts lie."""


class _SumGradient(torch.autograd.Function):
    """Identity forward; all-reduce backward, as each rank used its copy for features of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(gradient, ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """All-reduce forward; identity backward, as each rank goes on with the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumToParts(torch.autograd.Function):
    """Reduce-scatter along the sequence forward; all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        parts = torch.stack(x.chunk(group.size, SEQUENCE))
        part = torch.empty_like(parts[0])
        collectives.reduce_scatter(part.view(-1), parts.view(-1), group)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(gradient, SEQUENCE, ctx.group, differentiable=False), None


class _Join(torch.autograd.Function):
    """All-gather along the sequence forward; the own part of one of the equal copies backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gather_sequence(x, SEQUENCE, group, differentiable=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(gradient, SEQUENCE, ctx.group), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """How the residual stream lies on the tensor-parallel ranks, and how layers read and write it.

    Whole, each rank has a copy of it and of the loss. In parts (sequence parallelism), each rank
    has its tokens and their loss, so a parameter that all ranks have gets a part of its gradient on
    each: it is annotated `sequence_parallel`, and `finalize_model_grads` sums the parts.

    Attributes:
        group: `ParallelGroups.tp`.
        in_parts: whether it is divided along the sequence.
    """

    group: Group
    in_parts: bool = False

    @property
    def num_parts(self) -> int:
        """Into how many parts a sequence is divided."""
        return self.group.size if self.in_parts else 1

    def part(self, x: Tensor) -> Tensor:
        """What this rank has of tokens or targets that every rank knows, [batch, sequence]."""
        return x.chunk(self.num_parts, SEQUENCE)[self.group.rank if self.in_parts else 0]

    def read(self, x: Tensor) -> Tensor:
        """The whole sequence, for a layer that computes features of its own from it."""
        if self.in_parts:
            return gather_sequence(x, SEQUENCE, self.group)
        return _SumGradient.apply(x, self.group)

    def write(self, x: Tensor) -> Tensor:
        """The sum over the ranks of what each has for the whole sequence, back in the stream."""
        if self.in_parts:
            return _SumToParts.apply(x, self.group)
        return _Sum.apply(x, self.group)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Tokens for this rank alone, for a layer that treats each token once in the group."""
        return x if self.in_parts else scatter_sequence(x, SEQUENCE, self.group)

    def all_tokens(self, x: Tensor) -> Tensor:
        """What came of `own_tokens`, back in the stream."""
        return x if self.in_parts else _Join.apply(x, self.group)


class _ParallelLinear(nn.Module):
    """This rank's part of a linear layer without bias.

    Attributes:
        weight: this rank's rows or columns.
    """

    DIMENSION = 0

    def __init__(self, whole: nn.Linear, stream: Stream, blocks: int = 1) -> None:
        """Keep this rank's part of `whole`, whose rows are `blocks` fused matrices of one size.

        Raises:
            ValueError: the dimension has no equal parts.
        """
        super().__init__()
        self.stream = stream
        group, rows = stream.group, whole.out_features // blocks
        matrices = whole.weight.detach().split(rows)
        if matrices[0].shape[self.DIMENSION] % group.size:
            raise ValueError(
                f"--tp {group.size} does not divide matrices of shape {tuple(matrices[0].shape)}"
            )
        parts = [matrix.chunk(group.size, self.DIMENSION)[group.rank] for matrix in matrices]
        self.weight = nn.Parameter(torch.cat(parts))
        # The blocks only say what is divided: Muon takes a fused weight as one, as on one rank.
        fused = {"blocks": (rows,) * blocks, "split_blocks": False} if blocks > 1 else {}
        megatron_lw.annotate(self.weight, tp_dim=self.DIMENSION, **fused)


class ColumnParallelLinear(_ParallelLinear):
    """Rows of the weight: the whole input, some of the output features."""

    DIMENSION = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map the stream to this rank's features."""
        return functional.linear(self.stream.read(x), self.weight)


class RowParallelLinear(_ParallelLinear):
    """Columns of the weight: some of the input features, a summand of the whole output."""

    DIMENSION = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features to the stream."""
        return self.stream.write(functional.linear(x, self.weight))


def divide(model: GPT, stream: Stream) -> None:
    """Replace the matrices inside the blocks by this rank's parts, in place, and annotate them.

    A mixture of experts is left as it is: its experts are whole.

    Raises:
        ValueError: the heads do not divide by the ranks.
    """
    if model.config.heads % stream.group.size:
        raise ValueError(
            f"--heads {model.config.heads} must be a multiple of --tp {stream.group.size}"
        )
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        attention.qkv = ColumnParallelLinear(attention.qkv, stream, blocks=3)
        attention.output = RowParallelLinear(attention.output, stream)
        if isinstance(mlp, MLP):
            mlp.gate_up = ColumnParallelLinear(mlp.gate_up, stream, blocks=2)
            mlp.down = RowParallelLinear(mlp.down, stream)
        for norm in (block.attention_norm, block.mlp_norm):
            megatron_lw.annotate(norm.weight, sequence_parallel=stream.in_parts)
