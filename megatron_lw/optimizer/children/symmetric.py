"""Products that are known to be symmetric: on a CPU a part is computed and the rest mirrored.

A strip of rows is multiplied from its diagonal block on, and what lies left of that is copied from
the strips above: with four strips 5/8 of the arithmetic. In bf16 the bits are those of the whole
product on the CPU builds measured (oneDNN with and without bf16 instructions, MKL), so that an
iteration keeps the bits of one without strips. Elsewhere than on a CPU the product is taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_STRIP = 128
"""Rows of a strip at least: with fewer, kernels lose more than the arithmetic saves."""
_MOST_STRIPS = 4
_ALIGNMENT = 32


def gram_of(x: Tensor, out: Tensor, *, least: int) -> None:
    """Write x x^T into `out`.

    Args:
        x: [..., short, long].
        out: [..., short, short].
        least: short side from which a single matrix is multiplied in strips.
    """
    strips = _strips(out, least)
    if not strips:
        (torch.mm if x.ndim == 2 else torch.bmm)(x, x.mT, out=out)
    for low, high in strips:
        torch.mm(x[low:high], x[low:].mT, out=out[low:high, low:])
        _mirror(out, low, high)


def multiply_add(
    addend: Tensor,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    beta: float,
    alpha: float,
    least: int,
) -> None:
    """Write `beta addend + alpha left right`, which is known to be symmetric, into `out`.

    Args:
        addend: [..., short, short].
        left: the same.
        right: the same.
        out: the same; neither of the factors.
        beta: of the addend.
        alpha: of the product.
        least: see `gram_of`.
    """
    strips = _strips(out, least)
    if not strips:
        add = torch.addmm if out.ndim == 2 else torch.baddbmm
        add(addend, left, right, beta=beta, alpha=alpha, out=out)
    for low, high in strips:
        rows, rest = slice(low, high), slice(low, None)
        torch.addmm(
            addend[rows, rest],
            left[rows],
            right[:, rest],
            beta=beta,
            alpha=alpha,
            out=out[rows, rest],
        )
        _mirror(out, low, high)


def _strips(out: Tensor, least: int) -> Sequence[tuple[int, int]]:
    """First row of each strip and one past its last; none where the product is taken whole."""
    rows = out.size(-1)
    if out.ndim != 2 or rows < max(least, 2 * _STRIP) or out.device.type != "cpu":
        return ()
    number = min(_MOST_STRIPS, rows // _STRIP)
    starts = [rows * i // number // _ALIGNMENT * _ALIGNMENT for i in range(number)]
    return tuple(pairwise([*starts, rows]))


def _mirror(out: Tensor, low: int, high: int) -> None:
    """Copy what lies above the diagonal block of a strip to its left.

    Torch transposes a contiguous matrix 1.4 (in 512 rows) to 6 times (in 2048) as fast as a part of
    a larger one.
    """
    if low:
        out[low:high, :low].copy_(out[:low, low:high].contiguous().mT.contiguous())
