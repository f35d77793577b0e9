"""Models of given values whose gradients are given too, for the reports retold here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import megatron_lw
from tests.distributed.cases import Bag

Tensors = dict[str, torch.Tensor]
Built = tuple[megatron_lw.DistributedDataParallel, megatron_lw.LayerWiseDistributedOptimizer]

CONFIG: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 0.1,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "log_num_zeros_in_grad": True,
}
MUON = {**CONFIG, "optimizer": "muon", "muon_fp32_matmul_prec": "highest"}


def build(
    values: Tensors,
    *,
    config: Mapping[str, Any] = CONFIG,
    tags: Mapping[str, dict[str, Any]] | None = None,
    ddp_config: Mapping[str, Any] | None = None,
    overrides: dict[megatron_lw.ParamKey, megatron_lw.ParamGroupOverride] | None = None,
    **sizes: int,
) -> Built:
    """Wrap a model of these parameters on this rank, in groups of these sizes."""
    groups = megatron_lw.ParallelGroups.create(**sizes)
    model = Bag({}, torch.float32)
    for name, value in values.items():
        param = nn.Parameter(value.clone())
        if tags and name in tags:
            megatron_lw.annotate(param, **tags[name])
        model.register_parameter(name, param)
    settings = megatron_lw.OptimizerConfig(**config)
    ddp = megatron_lw.DistributedDataParallel(
        model, groups, megatron_lw.DDPConfig(**(ddp_config or {}))
    )
    return ddp, megatron_lw.get_megatron_optimizer(settings, [ddp], overrides)


def backward(built: Built, grads: Tensors) -> None:
    """Give the parameters these gradients on this rank; those left out get none."""
    ddp, optimizer = built
    optimizer.zero_grad()
    loss = ddp(grads)
    if loss.requires_grad:
        loss.backward()


def reduced(built: Built) -> dict[str, list[float]]:
    """The finished gradient of what lies in this rank's rows."""
    ddp, _ = built
    megatron_lw.finalize_model_grads([ddp])
    found: dict[str, list[float]] = {}
    for bucket in ddp.buckets:
        for name, slot in bucket.row_slots():
            part = bucket.grad_row[slot.row_start : slot.row_start + slot.numel]
            found.setdefault(name, []).extend(part.tolist())
    return found


def weights(built: Built) -> Tensors:
    """What the model holds, once all gathers have landed."""
    return {name: tensor.clone() for name, tensor in built[0].state_dict().items()}


def everything(built: Built) -> list[torch.Tensor]:
    """Weights, masters, states and step counts: all that a step may write."""
    ddp, optimizer = built
    found = list(weights(built).values())
    found += [publisher.master.row.clone() for publisher in ddp.publishers]
    for child in optimizer.runtime.children:
        found.append(torch.tensor(child.num_steps))
        for bucket in range(child.num_buckets):
            found += [row.clone() for row in child.state_rows(bucket).values()]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two lists hold the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
