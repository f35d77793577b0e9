"""Blocks of a `[rows, cols]` view: their maxima, and their products with one factor each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from megatron_lw.fp8 import rules
from megatron_lw.fp8.runs import Run

# Elements that are worked on at a time: what a core's cache holds, what keeps a GPU busy.
_CHUNK_CPU = 1 << 18
_CHUNK_GPU = 1 << 26
_SHORT = 128


def chunks(block: torch.Tensor, high: int, wide: int = 0) -> Sequence[torch.Tensor]:
    """A `[rows, cols]` view in parts of whole rows of blocks.

    Args:
        block: the view.
        high: rows of a block.
        wide: columns to count with, where `block` stands for something wider.
    """
    chunk = _CHUNK_CPU if block.device.type == "cpu" else _CHUNK_GPU
    rows = max(1, chunk // ((wide or block.shape[1]) * high)) * high
    parts: Sequence[torch.Tensor] = block.split(rows)
    return parts


def framed(part: torch.Tensor, run: Run, high: int) -> tuple[torch.Tensor, int]:
    """A part of a matrix among zeros, as rows from the beginning of its first row of blocks.

    Returns:
        `[rows, cols]`, and the index of that row of blocks.
    """
    first = run.start // (run.cols * high)
    begin = run.start - first * run.cols * high
    rows = -(-(begin + run.numel) // run.cols)
    frame = part.new_zeros(rows * run.cols)
    frame[begin : begin + run.numel] = part
    return frame.view(rows, run.cols), first


def block_maxima(rows: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """fp32 maxima of the blocks of a `[rows, cols]` view, `[rows / high, cols / wide]`."""
    return rules.largest(reduce_blocks(rules.magnitudes(rows), high, wide))


def reduce_blocks(bits: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """Maxima of blocks of integers; blocks at the lower and right edges may be smaller."""
    bits = _padded(bits, high, wide)
    rows, cols = bits.shape
    if high > 1:
        bits = bits.view(rows // high, high, cols).amax(1)
    if wide == 1:
        return bits
    blocks = bits.view(-1, cols // wide, wide)
    if bits.device.type == "cpu" and wide <= _SHORT:
        return blocks.int().amax(2).to(bits.dtype)  # maxima of a few int16 are slow there
    return blocks.amax(2)


def scale_blocks(rows: torch.Tensor, grid: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """A `[rows, cols]` view times one factor a block."""
    height, width = rows.shape
    padded = _padded(rows, high, wide)
    tall, broad = padded.shape[0] // high, padded.shape[1] // wide
    product = padded.view(tall, high, broad, wide) * grid.view(tall, 1, broad, 1)
    return product.view(padded.shape)[:height, :width]


def _padded(rows: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    below, right = -rows.shape[0] % high, -rows.shape[1] % wide
    return functional.pad(rows, (0, right, 0, below)) if below or right else rows
