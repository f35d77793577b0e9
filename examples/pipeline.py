"""Pipeline parallelism: the part of the GPT that a stage has, and micro-batches through the stages.

With one stage the part is the whole, nothing is sent, and each forward is followed by its backward.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import megatron_lw
from gpt import GPT
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from parallel_layers import Stream
from report import Clock

Batches = list[tuple[Tensor, Tensor]]


class Stage(nn.Module):
    """The layers that one pipeline stage has.

    Attributes:
        names: NameMap under which parameters have the names that they have in the whole model.
    """

    def __init__(self, model: GPT, group: Group, stream: Stream) -> None:
        """Take this rank's layers out of the whole model.

        Args:
            model: the whole model, perhaps divided over tensor-parallel ranks.
            group: `ParallelGroups.pp`.
            stream: what flows between the layers.

        Raises:
            ValueError: the stages cannot have equally many layers.
        """
        super().__init__()
        self.config, self.stream = model.config, stream
        layers = self.config.layers
        each, rest = divmod(layers, group.size)
        if rest:
            raise ValueError(f"--layers {layers} must be a multiple of --pp {group.size}")
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        first = group.rank * each
        self.names = megatron_lw.NameMap.with_layer_offsets("blocks", {0: first})
        tied = self.config.tied and group.size > 1  # then both ends have a copy, of one name
        if self.is_first or (self.is_last and tied):
            self.embedding = model.embedding
            megatron_lw.annotate(
                self.embedding.weight,
                embedding=True,
                tied="embedding" if tied else None,
                sequence_parallel=stream.in_parts,
            )
        self.blocks = model.blocks[first : first + each]
        if self.is_last:
            self.norm, self.head = model.norm, model.head
            megatron_lw.annotate(self.norm.weight, sequence_parallel=stream.in_parts)
            if not self.config.tied:  # its shape does not tell: no matrix for Muon, but for Adam
                megatron_lw.annotate(
                    self.head.weight, output=True, sequence_parallel=stream.in_parts
                )
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """What the next stage takes in, or the loss.

        Args:
            x: tokens for the first stage, else what the stage before has computed.
            targets: the byte after each token, int64 [batch, sequence].

        Returns:
            This rank's part of the residual stream [batch, sequence / parts, width]; from the last
            stage the mean cross-entropy of this rank's tokens, fp32 scalar, nats a byte.
        """
        sequence = targets.shape[1]
        if self.is_first:
            x = self.embedding(self.stream.part(x))
        for block in self.blocks:
            x = block(x, self.cos[:sequence], self.sin[:sequence])
        if not self.is_last:
            return x
        logits = self.head(self.norm(x))
        mine = self.stream.part(targets)
        return functional.cross_entropy(logits.flatten(0, 1).float(), mine.flatten())


class Pipeline:
    """Runs micro-batches through the stages, one forward and one backward in turn.

    The schedule is 1F1B (Narayanan et al. 2021, arXiv:2104.04473): a stage is ahead by as many
    forwards as there are stages after it. A stage keeps a gradient until the next micro-batch has
    come in: its neighbour sends that one before it waits for the gradient, and two ranks that both
    send first would wait for each other.
    """

    def __init__(
        self, ddp: megatron_lw.DistributedDataParallel, group: Group, clock: Clock
    ) -> None:
        """Remember the wrapped stage, `ParallelGroups.pp`, and where the time is written down."""
        self.ddp = ddp
        self.stage = cast(Stage, ddp.module)
        self.group = group
        self.clock = clock
        self._unsent: Tensor | None = None

    def train(self, batches: Batches) -> Tensor:
        """Forward and backward of one step; the gradients are those of the micro-batches' mean.

        Returns:
            Mean loss of this rank's tokens, fp32 scalar; 0 where the loss is not computed.
        """
        ahead = self.group.size - 1 - self.group.rank
        in_flight: deque[tuple[Tensor, Tensor]] = deque()
        total = torch.zeros((), device=batches[0][0].device)
        # A run's loss is the sum of its ranks' losses: a rank's tokens have their share in it.
        share = 1 / (len(batches) * self.stage.stream.num_parts)
        turns = len(batches) + ahead
        for turn in range(turns):
            if turn < len(batches):
                in_flight.append(self._forward(*batches[turn]))
            if turn >= ahead:
                x, output = in_flight.popleft()
                if self.stage.is_last:
                    total += output.detach() / len(batches)
                last = turn == turns - 1  # gradients are reduced with the last one
                with nullcontext() if last else self.ddp.no_sync():
                    self._backward(x, output, share)
        self._send_gradient()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:
        """Mean loss of this rank's tokens in batches of any size; 0 where it is not computed."""
        sequences = sum(len(tokens) for tokens, _ in batches)
        total = torch.zeros((), device=batches[0][0].device)
        for tokens, targets in batches:
            _, output = self._forward(tokens, targets)
            if self.stage.is_last:
                total += output * (len(tokens) / sequences)
        return total

    def _forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch through this stage: what came in, what goes out."""
        x = tokens
        if not self.stage.is_first:
            stage, (batch, sequence) = self.stage, targets.shape
            shape = (batch, sequence // stage.stream.num_parts, stage.config.width)
            x = torch.empty(shape, dtype=stage.config.dtype, device=targets.device)
            with self.clock.stage("pipeline"):
                collectives.recv(x, self.group.rank - 1, self.group, label="activation")
            self._send_gradient()
            x.requires_grad_()
        with self.clock.stage("forward"):
            output = self.ddp(x, targets)
        if not self.stage.is_last:
            with self.clock.stage("pipeline"):
                sent = output.detach().contiguous()
                collectives.send(sent, self.group.rank + 1, self.group, label="activation")
        return x, output

    def _backward(self, x: Tensor, output: Tensor, share: float) -> None:
        """Backward of one micro-batch, from its share in the loss or what the next stage sends."""
        self._send_gradient()
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        if self.stage.is_last:
            gradient.fill_(share)
        else:
            with self.clock.stage("pipeline"):
                collectives.recv(gradient, self.group.rank + 1, self.group, label="gradient")
        with self.clock.stage("backward"):
            output.backward(gradient)
        self._unsent = x.grad

    def _send_gradient(self) -> None:
        """Send the kept gradient, if there is one, to the stage before."""
        gradient, self._unsent = self._unsent, None
        if gradient is not None:
            with self.clock.stage("pipeline"):
                sent = gradient.contiguous()
                collectives.send(sent, self.group.rank - 1, self.group, label="gradient")
