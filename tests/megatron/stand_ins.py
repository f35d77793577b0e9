"""Modules that Megatron has on GPUs only, in plain torch, so that its loop runs on the CPU.

Its norms under sequence parallelism come from Apex or Transformer Engine, its attention under
context parallelism, for latent attention and for --qk-clip from Transformer Engine. Everything
around them is Megatron's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm


@contextmanager
def installed(core: type | None = None) -> Iterator[None]:
    """Megatron's local modules divide the sequence.

    Args:
        core: attention to put in their place; None: one that gathers the sequence.
    """
    theirs: Any = LocalSpecProvider
    norm: Any = WrappedTorchNorm
    attention, make_norm = theirs.core_attention, norm.__new__
    theirs.core_attention = lambda self: core or _GatheringAttention
    norm.__new__ = _sequence_parallel_norm(make_norm)
    try:
        yield
    finally:
        theirs.core_attention, norm.__new__ = attention, make_norm


def part_of_sequence(whole: torch.Tensor) -> torch.Tensor:
    """This context-parallel rank's part of a batch [samples, tokens]."""
    size = parallel_state.get_context_parallel_world_size()
    return whole.chunk(size, dim=1)[parallel_state.get_context_parallel_rank()].contiguous()


def _sequence_parallel_norm(make: Any) -> Any:
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module: torch.nn.Module = make(cls, plain, *args, **kwargs)
        for param in module.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module

    return new


class _GatheringAttention(DotProductAttention):  # type: ignore[misc]
    """Attention of this rank's queries to the keys and values of all context-parallel ranks."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.copy(config)
        plain.context_parallel_size = 1
        super().__init__(plain, *args, **kwargs)

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        start = parallel_state.get_context_parallel_rank() * query.size(0)
        key, value = _Gather.apply(key), _Gather.apply(value)
        places = torch.arange(start, start + query.size(0))[:, None]
        later = torch.arange(key.size(0))[None, :] > places
        return super().forward(query, key, value, later[None, None], *args, **kwargs)


class MeasuringAttention(torch.nn.Module):
    """Causal attention of whole sequences that keeps the largest logit of each head.

    Queries and keys may be wider than values.
    """

    def __init__(
        self, config: Any, *unused: Any, k_channels: int | None = None, **settings: Any
    ) -> None:
        super().__init__()
        width = k_channels or config.kv_channels
        self.softmax_scale: float = settings.get("softmax_scale") or width**-0.5
        self.current_max_attn_logits: torch.Tensor | None = None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """All are [tokens, samples, heads, width]; the result is [tokens, samples, -1]."""
        served = query.size(2) // key.size(2)
        key, value = (each.repeat_interleave(served, 2).float() for each in (key, value))
        logits = torch.einsum("sbnd,tbnd->bnst", query.float(), key) * self.softmax_scale
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
        largest, before = logits.detach().amax(dim=(0, 2, 3)), self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else largest.maximum(before)
        mixed = torch.einsum("bnst,tbnd->sbnd", logits.softmax(-1), value).to(query.dtype)
        return mixed.flatten(2)


class _Gather(torch.autograd.Function):
    """All parts of the sequence [tokens, ...], each rank's gradient from all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()]
