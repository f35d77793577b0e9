"""Whole parameters after training in several layouts; imported on ranks only."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from megatron.core import parallel_state

from tests.megatron.runs import Part, Run
from tests.megatron.training import train


def _parts(model: Any, optimizer: Any) -> list[Part]:
    """What this rank holds of each parameter, and which part of the whole it is."""
    described = optimizer.runtime.model
    found = []
    for info in described.infos:
        weight = described.params[info.name].detach().float()
        for pair in info.boxes:
            found.append(
                Part(
                    name=info.name,
                    shape=info.global_shape,
                    start=pair.world.start,
                    values=_cut(weight, pair.local.start, pair.local.shape).clone(),
                )
            )
    return found


def _cut(whole: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def _place(param: Any) -> tuple[int, int]:
    """Rank and size of the tensor parallelism that divides a parameter."""
    if getattr(param, "allreduce", True):
        rank = parallel_state.get_tensor_model_parallel_rank()
        return rank, parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_expert_tensor_parallel_rank()
    return rank, parallel_state.get_expert_tensor_parallel_world_size()


def _initialise(chunk: Any) -> None:
    """Matrices that are the same whole in every layout, cut as Megatron's own initialisers cut."""
    for name, param in chunk.named_parameters():
        if name.endswith((".bias", ".softmax_offset")):
            torch.nn.init.zeros_(param)  # Megatron's router and attention draw their own
        if param.dim() != 2:
            continue
        parallel = getattr(param, "tensor_model_parallel", False)
        rank, size = _place(param) if parallel else (0, 1)
        dim, stride = (param.partition_dim, param.partition_stride) if parallel else (0, 1)
        shape = list(param.shape)
        shape[dim] *= size
        values = torch.randn(
            shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
        )
        cuts = (0.02 * values).split(param.shape[dim] // stride, dim)
        with torch.no_grad():
            param.copy_(torch.cat(cuts[rank::size], dim))


def parts_in(layouts: list[list[str]]) -> list[tuple[Run, list[Part]]]:
    """Ours in each layout; what this rank holds at the end."""
    found = []
    for flags in layouts:
        run = train(flags, probe=_parts, prepare=_initialise)
        parts = run.extra[-1]
        run.extra = []
        found.append((run, parts))
    return found
