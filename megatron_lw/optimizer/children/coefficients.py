"""Coefficients of the Newton-Schulz polynomials, by name.

A step is `X <- a X + b (X X^T) X + c (X X^T)^2 X`: it applies the odd polynomial
`a s + b s^3 + c s^5` to every singular value `s` of X. A set lists one triple (a, b, c) a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from megatron_lw.errors import ConfigError

Triple = tuple[float, float, float]

MAX_STEPS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientSet:
    """The polynomials of one Newton-Schulz iteration, in the order in which they are applied.

    Attributes:
        triples: (a, b, c) of each step.
        beyond: what further steps use: the triples from the start again, or the last one.
        row_prescale: divide row i of the normalised X by sqrt(sum_j |X X^T|_ij) before the first
            step (the almost-orthogonal-layer bound, which the coefficients of `aol` rely on).
        needs_float32: whether the polynomials grow so fast beyond their interval that the rounding
            of half precision makes the iteration diverge.

    Raises:
        ConfigError: no triple, or one that is not three finite numbers.
    """

    triples: tuple[Triple, ...]
    beyond: Literal["cycle", "repeat_last"] = "cycle"
    row_prescale: bool = False
    needs_float32: bool = False

    def __post_init__(self) -> None:
        """Check the triples."""
        if not self.triples:
            raise ConfigError(
                f"coefficients = {self.triples!r} is empty; give at least one triple (a, b, c)"
            )
        for triple in self.triples:
            if len(triple) != 3 or not all(math.isfinite(value) for value in triple):
                raise ConfigError(
                    f"coefficients hold {triple!r}; give three finite numbers (a, b, c) a step"
                )

    def take(self, steps: int) -> CoefficientSet:
        """Return the set with exactly `steps` triples.

        Args:
            steps: number of Newton-Schulz steps, 1 to `MAX_STEPS`.

        Raises:
            ConfigError: `steps` is not such a number.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
            raise ConfigError(
                f"steps = {steps!r} is not a number of Newton-Schulz steps; use 1 to {MAX_STEPS}"
            )
        period = 1 if self.beyond == "repeat_last" else len(self.triples)
        triples = list(self.triples)
        while len(triples) < steps:
            triples.append(triples[-period])
        return replace(self, triples=tuple(triples[:steps]))


_SIMPLE: Triple = (3.4445, -4.7750, 2.0315)

COEFFICIENT_SETS: Mapping[str, CoefficientSet] = MappingProxyType(
    {
        # Jordan 2024; also torch.optim.Muon and Moonlight (arXiv:2502.16982). Steep at zero; does
        # not converge: singular values end between about 0.7 and 1.2.
        "simple": CoefficientSet(triples=(_SIMPLE,)),
        # You Jiacheng 2024: one polynomial a step, converges in five.
        "quintic": CoefficientSet(
            triples=(
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            )
        ),
        # Amsel et al., arXiv:2505.16932. All but the last, which converges, are already divided by
        # 1.01^degree, so that rounding cannot push a singular value out of the interval.
        "polar_express": CoefficientSet(
            triples=(
                (8.2051, -22.9019, 16.4607),
                (4.0664, -2.8612, 0.5184),
                (3.9096, -2.8234, 0.5250),
                (3.2856, -2.4153, 0.4853),
                (2.2779, -1.6198, 0.3985),
                (1.8726, -1.2307, 0.3585),
                (1.8564, -1.2132, 0.3568),
                (1.875, -1.25, 0.375),
            ),
            beyond="repeat_last",
        ),
        # Grishina et al., Chebyshev-type, arXiv:2506.10935. No margin for rounding: in bf16
        # singular values of 1e6 were seen on Gaussian matrices, of 1e30 where the rank is one.
        "cans": CoefficientSet(
            triples=(
                (8.4703, -25.1081, 18.6293),
                (4.1828, -3.1087, 0.5806),
                (3.9619, -2.9541, 0.5630),
                (3.2866, -2.4647, 0.5074),
                (2.2737, -1.6447, 0.4162),
            ),
            beyond="repeat_last",
            needs_float32=True,
        ),
        # Turbo-Muon: the pre-scale starts nearer to orthogonal, so four steps do.
        "aol": CoefficientSet(
            triples=(
                (4.0098, -7.0585, 2.4635),
                (3.4585, -5.5479, 2.5959),
                (2.7573, -3.2939, 1.4254),
                (2.7215, -3.0494, 1.3169),
            ),
            row_prescale=True,
        ),
        # DeepSeek-V4: eight steep steps, two that converge.
        "deepseekv4": CoefficientSet(
            triples=(_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, beyond="repeat_last"
        ),
    }
)


def resolve_coefficients(coefficients: str | Sequence[Triple], steps: int) -> CoefficientSet:
    """Return the polynomials of `steps` Newton-Schulz steps.

    A set shorter than `steps` goes on as its `beyond` says; given triples are cycled. A longer one
    is cut: fewer steps than a set lists leave out its last ones, which make it converge.

    Args:
        coefficients: a name in `COEFFICIENT_SETS`, or triples (a, b, c).
        steps: number of steps, 1 to `MAX_STEPS`.

    Raises:
        ConfigError: unknown name, bad triples or bad number of steps.
    """
    if not isinstance(coefficients, str):
        return CoefficientSet(triples=tuple(coefficients)).take(steps)
    if coefficients not in COEFFICIENT_SETS:
        known = ", ".join(COEFFICIENT_SETS)
        raise ConfigError(
            f"coefficients = {coefficients!r} is unknown; use one of {known}, or triples (a, b, c)"
        )
    return COEFFICIENT_SETS[coefficients].take(steps)
