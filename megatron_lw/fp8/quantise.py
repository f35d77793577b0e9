"""Quantise the matrices of a whole bucket in one call; the reference for every backend.

`quantise` is what a rank does that has all values. Where each rank has only its rows, the same
three steps are taken apart: `measure` the parts at hand, agree on the maxima by one maximum over
the ranks, `set_scales`, and `cast_run` the parts; then `derive_columns` once all bytes are there.
Maxima have no order and the cast is element by element, so both ways give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from megatron_lw.fp8 import rules
from megatron_lw.fp8.blocks import block_maxima, chunks, framed, reduce_blocks, scale_blocks
from megatron_lw.fp8.planes import PlaneLayout, Planes, row_scale_shape
from megatron_lw.fp8.recipe import MX_BLOCK, Recipe
from megatron_lw.fp8.runs import Run, blocks_of, plan_runs, whole_parts

_LARGE = 1 << 17
Plane = Literal["row", "col"]
History = Literal["advance", "keep", "replace", "restart"]
"""What becomes of maxima of past updates: the values are a further update, the same again, others
with the same past (a load), or others without a past."""


def quantise_bucket(
    values: torch.Tensor,
    shapes: Sequence[tuple[int, int]],
    offsets: Sequence[int],
    recipe: Recipe,
) -> Planes:
    """Quantise the matrices that lie in a flat tensor.

    Args:
        values: bf16 or fp32, `[numel]`, contiguous.
        shapes: rows and columns of each matrix.
        offsets: where each begins in `values`.
        recipe: the format.

    Raises:
        ConfigError: a shape has no blocks of the format.
    """
    planes = Planes.empty(shapes, recipe, values.device)
    runs = plan_runs(whole_parts(planes.layout.shapes, offsets), planes.layout)
    quantise(values, runs, planes, "restart")
    return planes


def quantise(
    values: torch.Tensor, runs: Sequence[Run], planes: Planes, history: History = "advance"
) -> None:
    """Fill both planes of whole matrices.

    Args:
        values: bf16 or fp32, flat, contiguous.
        runs: where the matrices lie in it.
        planes: written.
        history: `delayed` only: whether these values are a further update, the values that the
            planes hold already, or others, see `History`.
    """
    if planes.recipe.format == "mxfp8":
        for run in runs:
            _quantise_mxfp8(values, run, planes)
        if planes.recipe.derive_columns:
            derive_columns(planes)
        return
    maxima = measure(values, runs, planes.layout)
    multipliers = set_scales(planes, maxima, values.dtype, history)
    for run in runs:
        at = planes.layout.data[run.matrix]
        cast_run(values, run, multipliers, planes.layout, planes.row_data[at : at + run.numel])
    derive_columns(planes)


def measure(values: torch.Tensor, runs: Sequence[Run], layout: PlaneLayout) -> torch.Tensor:
    """Largest magnitudes of the blocks, as far as the runs hold them; 0 elsewhere.

    Returns:
        fp32 `[layout.row_scales[-1]]`, in the order of the row-wise scales.
    """
    maxima = torch.zeros(layout.row_scales[-1], dtype=torch.float32, device=values.device)
    for run in runs:
        high, wide = blocks_of(layout.recipe, run.cols)
        if run.whole:
            block, place = run.of(values), layout.row_scales[run.matrix]
        else:
            block, first = framed(run.of(values), run, high)
            place = layout.row_scales[run.matrix] + first * -(-run.cols // wide)
        found = [block_maxima(rows, high, wide) for rows in chunks(block, high)]
        for each in found:
            part = maxima[place : place + each.numel()]
            part.copy_(torch.maximum(part, each.view(-1)))
            place += each.numel()
    return maxima


def set_scales(
    planes: Planes, maxima: torch.Tensor, dtype: torch.dtype, history: History
) -> torch.Tensor:
    """Derive the row-wise scales from the maxima of all blocks.

    Args:
        planes: their row-wise scales, and histories, are written.
        maxima: fp32, as `measure` gives them, over all parts.
        dtype: of the values that were measured.
        history: see `quantise`.

    Returns:
        fp32, what to multiply the values of each block with.
    """
    recipe = planes.recipe
    if recipe.scales_are_codes:
        planes.row_scale.copy_(rules.exponent_codes(maxima))
        return rules.code_multipliers(planes.row_scale)
    if planes.history is not None:
        maxima = _follow(planes.history, maxima, history)
    overflow = torch.finfo(dtype if recipe.format == "block" else torch.float32).max
    powers = recipe.format == "block" and not recipe.fp32_scales
    scales = rules.fp32_scales(maxima, overflow=overflow, powers_of_two=powers)
    planes.row_scale.copy_(scales.reciprocal())
    return scales


def cast_run(
    values: torch.Tensor,
    run: Run,
    multipliers: torch.Tensor,
    layout: PlaneLayout,
    out: torch.Tensor,
) -> None:
    """Write the row-wise bytes of a run.

    Args:
        values: flat.
        run: what to cast of it.
        multipliers: of all blocks, from `set_scales`.
        layout: of the planes.
        out: uint8 `[run.numel]`, contiguous.
    """
    high, wide = blocks_of(layout.recipe, run.cols)
    place, width = layout.row_scales[run.matrix], -(-run.cols // wide)
    block, first = run.of(values), 0
    if not run.whole:
        block, first = framed(block, run, high)
    target = out.view(block.shape) if run.whole else torch.empty_like(block, dtype=torch.uint8)
    place += first * width
    done = 0
    for rows in chunks(block, high):
        count = -(-rows.shape[0] // high)
        part = multipliers[place : place + count * width].view(count, width)
        _cast(rows, part, high, wide, layout.recipe, target[done : done + rows.shape[0]])
        place, done = place + count * width, done + rows.shape[0]
    if not run.whole:
        begin = run.start - (first * high * run.cols)
        out.copy_(target.view(-1)[begin : begin + run.numel])


def cast_row_blocks(values: torch.Tensor, data: torch.Tensor, codes: torch.Tensor) -> None:
    """Row-wise MXFP8 bytes and codes of whole blocks of 1x32.

    Args:
        values: bf16 or fp32, flat.
        data: uint8 of the same size; written.
        codes: uint8, one a block; written.
    """
    recipe = Recipe(format="mxfp8")
    rows = values.view(-1, MX_BLOCK)
    codes.copy_(rules.exponent_codes(block_maxima(rows, 1, MX_BLOCK)).view(-1))
    _cast(rows, rules.code_multipliers(codes), 1, MX_BLOCK, recipe, data.view(rows.shape))


def quantise_all(values: torch.Tensor, planes: Planes, history: History = "advance") -> None:
    """Fill both planes of all matrices, whose values lie one after another.

    Args:
        values: bf16 or fp32, flat, contiguous.
        planes: written.
        history: see `quantise`.
    """
    layout = planes.layout
    runs = plan_runs(whole_parts(layout.shapes, layout.data[:-1]), layout)
    quantise(values, runs, planes, history)


def derive_columns(planes: Planes) -> None:
    """Fill the column-wise plane from the row-wise one; not for `mxfp8` with two quantisations."""
    layout, recipe = planes.layout, planes.recipe
    if recipe.format == "mxfp8-2d":
        planes.col_data.copy_(planes.row_data)
        planes.col_scale.copy_(planes.row_scale)
        return
    for first, count in _equal_shapes(layout):
        rows, cols = layout.shapes[first]
        begin, end = layout.data[first], layout.data[first + count]
        data = planes.row_data[begin:end].view(count, rows, cols)
        if recipe.columns_transposed:
            _transpose(data, planes.col_data[begin:end].view(count, cols, rows))
        else:
            _columns_of_rows(planes, first, count)
    if recipe.columns_transposed:
        _transpose_scales(planes)


def dequantise(
    planes: Planes, dtype: torch.dtype, plane: Plane = "row", index: int = 0
) -> torch.Tensor:
    """The values of one matrix, `[M, K]`, from one of its planes.

    Exact in fp32, and in bf16 too with power-of-two scales unless a value is subnormal there.
    """
    recipe, at = planes.recipe, planes.layout
    rows, cols = at.shapes[index]
    data = planes.row_data if plane == "row" else planes.col_data
    scale = planes.row_scale if plane == "row" else planes.col_scale
    starts = at.row_scales if plane == "row" else at.col_scales
    flipped = plane == "col" and recipe.columns_transposed
    height, width = (cols, rows) if flipped else (rows, cols)
    numbers = rules.numbers(data[at.data[index] : at.data[index + 1]]).view(height, width)
    scale = scale[starts[index] : starts[index + 1]]
    factors = rules.code_values(scale) if recipe.scales_are_codes else scale
    high, wide = recipe.block or (height, width)
    if plane == "col" and recipe.format == "mxfp8":
        high, wide = wide, high
    grid = factors.view(-(-height // high), -(-width // wide))
    numbers = scale_blocks(numbers, grid, high, wide)
    return (numbers.t() if flipped else numbers).to(dtype)


def _follow(stored: torch.Tensor, maxima: torch.Tensor, history: History) -> torch.Tensor:
    """Move the histories on; the maxima from which the scales follow.

    Without a past (none yet, or all zeros) the values' own maximum is used.
    """
    if history == "advance":
        stored.copy_(torch.cat([maxima[:, None], stored[:, :-1]], dim=1))
    elif history != "keep":
        if history == "restart":
            stored.zero_()
        stored[:, 0] = maxima
    past = stored[:, 1:].amax(1)
    return torch.where(past == 0, stored[:, 0], past)


def _quantise_mxfp8(values: torch.Tensor, run: Run, planes: Planes) -> None:
    """Both planes of whole matrices with blocks of 1x32 and 32x1, in one pass over the values."""
    layout = planes.layout
    data, row = layout.data[run.matrix], layout.row_scales[run.matrix]
    col = layout.col_scales[run.matrix]
    for rows in chunks(run.of(values), MX_BLOCK):
        high, wide = rows.shape
        size = rows.numel()
        bits = rules.magnitudes(rows)
        both = ((1, MX_BLOCK), (MX_BLOCK, 1))[: 1 if planes.recipe.derive_columns else 2]
        maxima = [reduce_blocks(bits, tall, broad).view(-1) for tall, broad in both]
        codes = rules.exponent_codes(rules.largest(torch.cat(maxima)))
        factors = rules.code_multipliers(codes).split(size // MX_BLOCK)
        for (tall, broad), part, factor, scales, place, out in zip(
            both,
            codes.split(size // MX_BLOCK),
            factors,
            (planes.row_scale, planes.col_scale),
            (row, col),
            (planes.row_data, planes.col_data),
            strict=False,
        ):
            scales[place : place + part.numel()].copy_(part)
            grid = factor.view(high // tall, wide // broad)
            target = out[data : data + size].view(high, wide)
            _cast(rows, grid, tall, broad, planes.recipe, target)
        data, row, col = data + size, row + size // MX_BLOCK, col + size // MX_BLOCK


def _columns_of_rows(planes: Planes, first: int, count: int) -> None:
    """Column-wise MXFP8 of equal matrices, from the values of their row-wise plane."""
    layout = planes.layout
    rows, cols = layout.shapes[first]
    data, place = layout.data[first], layout.col_scales[first]
    scales = planes.row_scale[layout.row_scales[first] : layout.row_scales[first + count]]
    flat = planes.row_data[data : layout.data[first + count]].view(count * rows, cols)
    grid = scales.view(count * rows, cols // MX_BLOCK)
    for part, codes in zip(chunks(flat, MX_BLOCK), chunks(grid, MX_BLOCK, cols), strict=True):
        numbers = scale_blocks(
            rules.numbers(part), rules.code_values(codes), 1, MX_BLOCK
        ).bfloat16()
        made = rules.exponent_codes(
            rules.largest(reduce_blocks(rules.magnitudes(numbers), MX_BLOCK, 1))
        )
        planes.col_scale[place : place + made.numel()].copy_(made.view(-1))
        target = planes.col_data[data : data + part.numel()].view(part.shape)
        _cast(numbers, rules.code_multipliers(made), MX_BLOCK, 1, planes.recipe, target)
        data, place = data + part.numel(), place + made.numel()


def _transpose(data: torch.Tensor, out: torch.Tensor) -> None:
    """Transpose matrices `[count, rows, cols]`; large ones one by one, which torch does faster."""
    if data[0].numel() < _LARGE:
        out.copy_(data.transpose(1, 2))
        return
    for matrix, target in zip(data, out, strict=True):
        target.copy_(matrix.t())


def _transpose_scales(planes: Planes) -> None:
    layout = planes.layout
    if planes.recipe.block is None:
        planes.col_scale.copy_(planes.row_scale)
        return
    for first, count in _equal_shapes(layout):
        high, wide = row_scale_shape(layout.shapes[first], planes.recipe)
        begin, end = layout.row_scales[first], layout.row_scales[first + count]
        grid = planes.row_scale[begin:end].view(count, high, wide)
        planes.col_scale[begin:end].view(count, wide, high).copy_(grid.transpose(1, 2))


def _equal_shapes(layout: PlaneLayout) -> Iterator[tuple[int, int]]:
    """First matrix and number of neighbours of equal shape."""
    first = 0
    for index in range(1, len(layout.shapes) + 1):
        if index == len(layout.shapes) or layout.shapes[index] != layout.shapes[first]:
            yield first, index - first
            first = index


def _cast(
    rows: torch.Tensor,
    multipliers: torch.Tensor,
    high: int,
    wide: int,
    recipe: Recipe,
    out: torch.Tensor,
) -> None:
    """Multiply the blocks and write bytes. A power of two is exact in bf16 as well as in fp32.

    Where the product is subnormal in bf16 it may be rounded, and is zero as a byte either way.
    """
    exact = recipe.scales_are_codes or (recipe.format == "block" and not recipe.fp32_scales)
    if exact:
        multipliers = multipliers.to(rows.dtype)
    else:
        rows = rows.float()
    rules.cast(scale_blocks(rows, multipliers, high, wide), out)
