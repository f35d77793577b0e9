"""Products that are known to be symmetric: on a CPU a part is computed and the rest mirrored.

A strip of columns is multiplied from its diagonal block down, and what lies right of that block is
copied from below it: with four strips 5/8 of the arithmetic. In bf16 the bits are those of the
whole product on the CPU builds measured (oneDNN with and without bf16 instructions, MKL), so that
an iteration keeps the bits of one without strips. Elsewhere than on a CPU the product is taken
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_STRIP = 128
"""Columns of a strip at least: with fewer, kernels lose more than the arithmetic saves."""
_MOST_STRIPS = 4
_ALIGNMENT = 32


class Strip(NamedTuple):
    """A strip of a product, as views of where it is written.

    Attributes:
        low: its first column.
        high: one past its last.
        block: [rows - low, high - low], from the diagonal down: what is multiplied.
        below: [rows - high, high - low], the part of it that is below the diagonal block.
        right: [high - low, rows - high], the mirror image of `below`.
    """

    low: int
    high: int
    block: Tensor
    below: Tensor
    right: Tensor

    def mirror(self) -> None:
        """Copy what lies below the diagonal block to its right.

        Torch transposes a contiguous matrix 1.4 (of 512 rows) to 6 times (of 2048) as fast as a
        part of a larger one.
        """
        if self.below.numel():
            self.right.copy_(self.below.contiguous().mT.contiguous())


def strips_of(out: Tensor, least: int) -> tuple[Strip, ...]:
    """The strips of a product; none where it is taken whole.

    Args:
        out: [..., short, short].
        least: short side from which a single matrix is multiplied in strips.
    """
    rows = out.size(-1)
    if out.ndim != 2 or rows < max(least, 2 * _STRIP) or out.device.type != "cpu":
        return ()
    number = min(_MOST_STRIPS, rows // _STRIP)
    starts = [rows * i // number // _ALIGNMENT * _ALIGNMENT for i in range(number)]
    return tuple(
        Strip(low, high, out[low:, low:high], out[high:, low:high], out[low:high, high:])
        for low, high in pairwise([*starts, rows])
    )


def gram_of(x: Tensor, out: Tensor, strips: Sequence[Strip]) -> None:
    """Write x x^T into `out`.

    Args:
        x: [..., short, long].
        out: [..., short, short].
        strips: of `out`.
    """
    if not strips:
        (torch.mm if x.ndim == 2 else torch.bmm)(x, x.mT, out=out)
    for strip in strips:
        torch.mm(x[strip.low :], x[strip.low : strip.high].mT, out=strip.block)
        strip.mirror()


def multiply_add(
    addend: Tensor,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    strips: Sequence[Strip],
    *,
    beta: float,
    alpha: float,
) -> None:
    """Write `beta addend + alpha left right`, which is known to be symmetric, into `out`.

    Args:
        addend: [..., short, short].
        left: the same.
        right: the same.
        out: the same; neither of the factors.
        strips: of `out`.
        beta: of the addend.
        alpha: of the product.
    """
    if not strips:
        add = torch.addmm if out.ndim == 2 else torch.baddbmm
        add(addend, left, right, beta=beta, alpha=alpha, out=out)
    for strip in strips:
        rows, cols = slice(strip.low, None), slice(strip.low, strip.high)
        torch.addmm(
            addend[rows, cols],
            left[rows],
            right[:, cols],
            beta=beta,
            alpha=alpha,
            out=strip.block,
        )
        strip.mirror()
