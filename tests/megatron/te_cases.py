"""Megatron's layers with MXFP8 weights of Transformer Engine; imported on ranks only.

Transformer Engine's own layers need its kernels. Here its tensors are the weights of Megatron's
local layers, which multiply with the values that the tensors hold.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_lw import dist_checkpointing
from megatron_lw.fp8 import QuantisedTensor
from megatron_lw.fp8.te import write_planes
from tests import te_stub
from tests.distributed.te_cases import Product
from tests.megatron.runs import Run
from tests.megatron.training import train
from tests.te_weights import RECIPES, keep_initial, theirs, weight

KIND = "mxfp8"
KEPT = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")


def _multiply(input: torch.Tensor, weight: Any, bias: Any, **unused: Any) -> torch.Tensor:
    """In place of the product of a layer that tensor parallelism does not divide."""
    product = Product.apply(input.flatten(0, -2), weight, bias, KIND)
    return product.view(*input.shape[:-1], -1)


def _convert(te: Any, chunk: Any) -> None:
    """Keep the weights of attention and MLP as Transformer Engine does."""
    chunk.bfloat16()
    for layer in chunk.decoder.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            before = layer.weight
            values = before.detach().clone()
            param = weight(te, KIND, tuple(values.shape))
            write_planes({"": param}, QuantisedTensor.from_values(values, RECIPES[KIND]).planes)
            keep_initial(te, param, values)
            vars(param).update({key: vars(before)[key] for key in KEPT if key in vars(before)})
            layer.weight = param
            layer._forward_impl = _multiply


def _quantised(chunk: Any) -> dict[str, Any]:
    return {
        name: param
        for bucket in chunk.buckets
        for group in bucket.quantised
        for name, param in group.params.items()
    }


def _held(chunk: Any) -> dict[str, torch.Tensor]:
    """The values of both planes of every quantised weight."""
    chunk.finish_param_sync()
    return {
        f"{name}, {plane}": theirs(param, KIND, plane).float()
        for name, param in _quantised(chunk).items()
        for plane in ("row", "col")
    }


def trained(flags: list[str], gather: bool) -> tuple[Run, list[str]]:
    """Six steps; what each weight holds at the end, and what was wrong on the way."""
    wrong: list[str] = []

    def probe(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        [chunk] = model
        optimizer.check()  # also that the bytes are those of the masters
        if chunk.ddp_config.fp8_param_gather is not gather:
            wrong.append(f"fp8_param_gather is {chunk.ddp_config.fp8_param_gather}")
        for name, param in _quantised(chunk).items():
            if any("high_precision_init_val" in key for key in vars(param)):
                wrong.append(f"{name} has kept its initial values")
        return _held(chunk)

    def amend(args: Any) -> None:
        args.fp8_param_gather = gather

    with te_stub.installed() as te:
        return train(flags, prepare=partial(_convert, te), probe=probe, amend=amend), wrong


def saved_and_loaded(directory: str, flags: list[str]) -> list[tuple[int, int]]:
    """For each step: weights, and those that a load has brought back after they were changed."""

    steps: list[int] = []

    def probe(model: Any, optimizer: Any) -> tuple[int, int]:
        [chunk] = model
        before = _held(chunk)
        step = len(steps)
        steps.append(step)
        where = f"{directory}/{step}"
        dist_checkpointing.save(where, model, optimizer, step=step)
        for publisher in chunk.publishers:
            publisher.master.row.zero_()
        chunk.masters_newer = True
        chunk.start_param_sync()
        assert all((values == 0).all() for values in _held(chunk).values())
        dist_checkpointing.load(where, model, optimizer)
        after = _held(chunk)
        optimizer.check()
        return len(before), sum(torch.equal(before[key], after[key]) for key in before)

    with te_stub.installed() as te:
        return train(flags, prepare=partial(_convert, te), probe=probe).extra
