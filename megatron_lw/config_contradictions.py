"""Settings that contradict each other: what `OptimizerConfig` refuses beyond single values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_lw.config import OptimizerConfig


def contradicting_flags(config: OptimizerConfig) -> Iterator[str]:
    """One sentence for each pair of flags that exclude each other; values may be of any type."""
    if config.bf16 and config.fp16:
        yield (
            f"OptimizerConfig.bf16={config.bf16!r} and fp16={config.fp16!r} contradict each other; "
            "drop fp16"
        )
    if config.use_distributed_optimizer and config.use_layer_wise_distributed_optimizer:
        yield (
            "OptimizerConfig.use_distributed_optimizer=True contradicts "
            "use_layer_wise_distributed_optimizer=True, as they name two different optimizers; "
            "drop use_distributed_optimizer"
        )


def contradicting_values(config: OptimizerConfig) -> Iterator[str]:
    """One sentence for each pair of values that exclude each other; each by itself is allowed."""
    yield from _contradicting_precision(config)
    yield from _contradicting_coefficients(config)
    yield from _contradicting_whole(config)
    if not config.decoupled_weight_decay and config.weight_decay_mode not in ("decoupled", "l2"):
        yield (
            "OptimizerConfig.decoupled_weight_decay=False means 'l2' and contradicts "
            f"weight_decay_mode={config.weight_decay_mode!r}; drop it"
        )
    low = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    pairs = (
        ("min_lr", config.min_lr, "lr", config.lr),
        ("decoupled_min_lr or min_lr", low, "decoupled_lr", config.decoupled_lr),
    )
    for low_name, smallest, high_name, largest in pairs:
        if smallest is not None and largest is not None and smallest > largest:
            yield (
                f"OptimizerConfig.{low_name}={smallest!r} is above {high_name}={largest!r}; "
                "lower the one or raise the other"
            )
    if config.decoupled_min_lr is not None and config.decoupled_lr is None:
        yield (
            f"OptimizerConfig.decoupled_min_lr={config.decoupled_min_lr!r} needs decoupled_lr, "
            "which is None; set decoupled_lr or drop decoupled_min_lr"
        )


def _contradicting_precision(config: OptimizerConfig) -> Iterator[str]:
    if not config.fp16 and config.loss_scale not in (None, 1.0):
        yield (
            f"OptimizerConfig.loss_scale={config.loss_scale!r} needs fp16=True: only FP16 "
            "training scales its loss; drop it"
        )
    for dtype, name, set_ in (
        (torch.bfloat16, "bf16", config.bf16),
        (torch.float16, "fp16", config.fp16),
    ):
        if config.params_dtype == dtype and not set_:
            yield (
                f"OptimizerConfig.params_dtype={config.params_dtype} contradicts {name}=False; "
                f"set {name}=True"
            )


def _contradicting_whole(config: OptimizerConfig) -> Iterator[str]:
    if config.optimizer == "whole" and config.whole_optimizer is None:
        yield (
            "OptimizerConfig.optimizer='whole' needs whole_optimizer, which is None; give the path "
            "of a class, such as 'torch.optim:Adagrad'"
        )


def _contradicting_coefficients(config: OptimizerConfig) -> Iterator[str]:
    custom = config.muon_coefficient_type == "custom"
    if custom and config.muon_coefficients is None:
        yield (
            "OptimizerConfig.muon_coefficient_type='custom' needs muon_coefficients, which is "
            "None; give triples (a, b, c)"
        )
    if not custom and config.muon_coefficients is not None:
        yield (
            f"OptimizerConfig.muon_coefficients={config.muon_coefficients!r} is not read with "
            f"muon_coefficient_type={config.muon_coefficient_type!r}; pass 'custom' or drop it"
        )
