"""The only module that imports Transformer Engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def load_fused_adam() -> Callable[..., torch.optim.Optimizer]:
    """Transformer Engine's `FusedAdam` class.

    Raises:
        ImportError: Transformer Engine is not installed or cannot load its kernels.
    """
    try:
        module: Any = importlib.import_module("transformer_engine.pytorch.optimizers")
    except OSError as error:
        raise ImportError(f"Transformer Engine cannot load its kernels: {error}") from error
    loaded: Callable[..., torch.optim.Optimizer] = module.FusedAdam
    return loaded
