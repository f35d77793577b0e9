"""Gradient norm and zero count against those of whole gradients; imported on ranks only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_lw.distributed.collectives import all_gather_rows
from tests.megatron.training import train

Counted = tuple[float, int, int]


def _whole_gradients(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Global name and finished gradient of every parameter of a chunk, on every rank."""
    for bucket in chunk.buckets:
        grads = bucket.grads.clone()
        all_gather_rows(grads, bucket.group)
        for name, start in zip(bucket.names, bucket.layout.offsets, strict=True):
            yield name, grads[start : start + bucket.params[name].numel()].clone()


def _place(param: Any) -> int:
    """Which part of the parameter this rank holds, by Megatron's own tags and ranks."""
    if not param.tensor_model_parallel:
        return 0
    if getattr(param, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_rank()
    return parallel_state.get_expert_tensor_parallel_rank()


def _one_process(model: Any) -> Counted:
    """Norm and zeros of all parts of all parameters, each once, and the number of parts.

    Copies of a part must be equal: replicas, and the two ends of a tied embedding.
    """
    mine = [
        ((name, _place(bucket.params[name])), grad)
        for chunk in model
        for bucket in chunk.buckets
        for found, grad in _whole_gradients(chunk)
        for name in bucket.names
        if name == found
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    parts: dict[tuple[str, int], torch.Tensor] = {}
    for key, grad in (entry for entries in gathered for entry in entries):
        torch.testing.assert_close(parts.setdefault(key, grad), grad, msg=f"copies of {key}")
    total = sum(float(grad.double().square().sum()) for grad in parts.values())
    zeros = sum(int((grad == 0).sum()) for grad in parts.values())
    return total**0.5, zeros, len(parts)


@contextmanager
def _no_default_group() -> Iterator[None]:
    """Whatever falls back to the default group fails."""

    def poisoned(*_: Any) -> Any:
        raise RuntimeError("the default group was asked for")

    module: Any = distributed_c10d
    original = module._get_default_group
    module._get_default_group = poisoned
    try:
        yield
    finally:
        module._get_default_group = original


def statistics(flags: list[str]) -> list[tuple[tuple[float | None, int | None], Counted]]:
    """For each step: our norm and zero count, and what one process finds."""
    expected: list[Counted] = []

    def around(model: Any, optimizer: Any, step: Any) -> Any:
        expected.append(_one_process(model))
        with _no_default_group():
            return step()

    run = train([*flags, "--train-iters", "2"], around=around)
    return list(zip(zip(run.norms, run.zeros, strict=True), expected, strict=True))
