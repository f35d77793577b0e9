"""What the checks of single members work on; imported on ranks only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_lw.distributed.buffers import GradState
from megatron_lw.errors import LayerWiseError, StateError


class World:
    """A wrapped model and its optimizer after one step of the loop."""

    def __init__(self, chunk: Any, optimizer: Any) -> None:
        self.chunk = chunk
        self.optimizer = optimizer

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(0, 100, (2, 32))
        positions = torch.arange(32).repeat(2, 1)
        mask = torch.ones(2, 1, 32, 32).triu(1).bool()
        return self.chunk(tokens, positions, mask, labels=tokens).mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.scale_loss(self.forward()).backward()

    def step(self) -> Any:
        self.backward()
        return self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        self.chunk.finish_param_sync()
        return [param.detach().clone() for param in self.chunk.parameters()]

    def states(self) -> set[GradState]:
        return {bucket.grad_state for bucket in self.chunk.buckets}


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def refuses(call: Callable[[], Any], text: str, kind: type[LayerWiseError] = StateError) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")
