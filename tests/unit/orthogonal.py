"""What the Newton-Schulz tests share: the oracle, matrices, tolerances."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lw.optimizer.children.coefficients import (
    COEFFICIENT_SETS,
    CoefficientSet,
    resolve_coefficients,
)
from megatron_lw.optimizer.children.newton_schulz import Iteration, NewtonSchulz
from tests.reference import orthogonalise

FULL_STEPS = {name: len(listed.triples) for name, listed in COEFFICIENT_SETS.items()} | {
    "simple": 5
}
HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32, torch.float64]
USABLE = [(name, dtype) for name in COEFFICIENT_SETS for dtype in DTYPES if name != "cans"]
USABLE += [("cans", torch.float32), ("cans", torch.float64)]
# Relative Frobenius error against the oracle, 96 x 200 and smaller.
TOLERANCE = {
    torch.bfloat16: 0.15,
    torch.float16: 1e-2,
    torch.float32: 2e-5,
    torch.float64: 1e-12,
}


def newton_schulz(
    name: str = "quintic",
    steps: int | None = None,
    dtype: torch.dtype = torch.float32,
    iteration: Iteration = "standard",
) -> NewtonSchulz:
    """The engine with a named set."""
    coefficients = resolve_coefficients(name, steps or FULL_STEPS[name])
    return NewtonSchulz(coefficients, dtype=dtype, iteration=iteration)


def oracle(matrix: Tensor, coefficients: CoefficientSet) -> Tensor:
    """The iteration as it is written in the papers, in float64, one matrix."""
    prescale = coefficients.row_prescale
    result: Tensor = orthogonalise(matrix, coefficients.triples, row_prescale=prescale)
    return result


def power_law(rows: int, columns: int) -> Tensor:
    """A matrix whose singular values fall as 1/k, as those of momenta do, in float64."""
    rank = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, rank, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, rank, dtype=torch.float64)).Q
    product: Tensor = left.div(torch.arange(1, rank + 1)) @ right.T
    return product


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
