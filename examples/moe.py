"""A mixture of experts in place of the MLP: each token goes to one expert, wherever that one lives.

The experts are distributed over the expert-parallel ranks, whole. A token's expert is the one of
largest router probability, which scales the result (Switch Transformer, Fedus et al. 2021,
arXiv:2101.03961). No token is dropped and no loss balances the load, so what a token gets depends
on nothing but itself, and any number of ranks computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import megatron_lw
from gpt import GPT, MLP, GPTConfig
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from parallel_layers import Stream


class _Exchange(torch.autograd.Function):
    """Runs of rows to each rank and from each rank; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """All-to-all of rows of `x`, [sum(sent), ...], in group order; gives [sum(received), ...]."""
    output = x.new_empty(sum(received), *x.shape[1:])
    width = x[0:1].numel() if len(x) else output[0:1].numel()
    collectives.all_to_all(
        output.view(-1),
        x.contiguous().view(-1),
        [rows * width for rows in received],
        [rows * width for rows in sent],
        group,
    )
    return output


class MoE(nn.Module):
    """Router and this rank's experts.

    Attributes:
        experts: number of an expert among all -> the expert; so parameter names are global.
    """

    def __init__(self, config: GPTConfig, experts: int, group: Group, stream: Stream) -> None:
        """Draw router and all experts, as every rank does, and keep this rank's experts.

        Args:
            config: of the model; an expert has the shape of its MLP.
            experts: number of experts on all ranks together.
            group: `ParallelGroups.ep`, over which they are distributed.
            stream: where the tokens are.

        Raises:
            ValueError: the ranks cannot have equally many.
        """
        super().__init__()
        self.each, rest = divmod(experts, group.size)
        if rest or not self.each:
            raise ValueError(f"--experts {experts} must be a multiple of --ep {group.size}")
        self.group, self.stream = group, stream
        self.router = nn.Linear(config.width, experts, bias=False)
        nn.init.normal_(self.router.weight, std=config.width**-0.5)
        drawn = [_expert(config) for _ in range(experts)]
        first = group.rank * self.each
        self.experts = nn.ModuleDict(
            {str(number): drawn[number] for number in range(first, first + self.each)}
        )
        self.to(config.dtype)
        # Each tensor-parallel rank routes tokens of its own, whether the stream is divided or not.
        megatron_lw.annotate(self.router.weight, sequence_parallel=stream.group.size > 1)
        for weight in self.experts.parameters():
            megatron_lw.annotate(weight, expert=True)

    def forward(self, x: Tensor) -> Tensor:
        """Send each token of `x` to its expert and back."""
        mine = self.stream.own_tokens(x)
        tokens = mine.flatten(0, -2)
        probability, choice = functional.softmax(self.router(tokens).float(), dim=-1).max(dim=-1)
        order = choice.argsort(stable=True)  # by expert, so also by the rank that has it
        results = self._dispatch(tokens[order], choice)[order.argsort()]
        results = results * probability.to(results.dtype)[:, None]
        return self.stream.all_tokens(results.view_as(mine))

    def _dispatch(self, tokens: Tensor, choice: Tensor) -> Tensor:
        """Results of the experts for tokens that lie in the order of their experts."""
        ranks = self.group.size
        wanted = choice.bincount(minlength=ranks * self.each)
        each = [self.each] * ranks
        asked = _exchange(wanted, each, each, self.group).view(ranks, self.each)  # of my experts
        sent, received = wanted.view(ranks, -1).sum(1).tolist(), asked.sum(1).tolist()
        arrived = _Exchange.apply(tokens, sent, received, self.group)
        runs = list(arrived.split(asked.flatten().tolist()))  # by rank, then by expert
        for index, expert in enumerate(self.experts.values()):
            its_runs = runs[index :: self.each]
            results = expert(torch.cat(its_runs))
            runs[index :: self.each] = results.split([len(run) for run in its_runs])
        return _Exchange.apply(torch.cat(runs), received, sent, self.group)


def _expert(config: GPTConfig) -> MLP:
    """An expert as `GPT.reset_parameters` draws an MLP: its result is zero at first."""
    expert = MLP(config)
    nn.init.normal_(expert.gate_up.weight, std=config.width**-0.5)
    nn.init.zeros_(expert.down.weight)
    return expert


def add_experts(model: GPT, experts: int, group: Group, stream: Stream) -> None:
    """Put a mixture of experts in the place of every MLP; arguments as for `MoE`."""
    for block in model.blocks:
        block.mlp = MoE(model.config, experts, group, stream)
