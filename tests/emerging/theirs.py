"""Emerging-optimizers on whole matrices, in one process."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.distributed.cases import Shapes, initial_values, mean_grads

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def uncompiled() -> None:
    """Leave its functions as they are written: a compiler would take longer than all the steps.

    Their decorators import the compiler, which is deprecated in parts.
    """
    torch._dynamo.config.disable = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for part in ("soap", "scalar_optimizers", "orthogonalized_optimizers"):
            importlib.import_module(f"emerging_optimizers.{part}")


def on_one_process(
    make: Make, shapes: Shapes, ranks: int, steps: int, kind: str = "integer"
) -> dict[str, Any]:
    """The matrices after some steps with the mean gradients of the ranks."""
    values = {n: v for n, v in initial_values(shapes).items() if v.dim() == 2}
    params = {n: torch.nn.Parameter(v) for n, v in values.items()}
    optimizer = make(list(params.values()))
    for step in range(steps):
        grads = mean_grads(kind, shapes, ranks, step)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}
