"""A model on the one GPU, wrapped, with its optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

import megatron_lw


def wrap(
    model: nn.Module, config: dict[str, Any], *, overlap: bool, fp8_param_gather: bool = False
) -> tuple[megatron_lw.DistributedDataParallel, megatron_lw.LayerWiseDistributedOptimizer]:
    """Wrap a model in groups of one rank.

    Args:
        model: on the device.
        config: of the optimizer.
        overlap: of gradients and of weights.
        fp8_param_gather: as `DDPConfig` has it.
    """
    settings = megatron_lw.DDPConfig(
        fp8_param_gather=fp8_param_gather,
        overlap_param_gather=overlap,
        overlap_grad_reduce=overlap,
    )
    groups = megatron_lw.ParallelGroups.single()
    ddp = megatron_lw.DistributedDataParallel(model, groups, settings)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**config), [ddp])
    return ddp, optimizer
