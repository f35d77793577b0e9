"""The tensors in which Transformer Engine keeps a weight, and their layout beside ours.

Bytes lie there as here. Scales are padded, and one that several blocks share stands once for each.
Nothing of Transformer Engine is imported: who asks knows the recipe of the weight (`te.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_lw.errors import ConfigError
from megatron_lw.fp8.planes import Planes, col_scale_shape, row_scale_shape
from megatron_lw.fp8.recipe import MX_BLOCK, Recipe


def buffers(
    name: str, param: torch.Tensor, recipe: Recipe, *, stale: bool = True
) -> dict[str, torch.Tensor]:
    """Transformer Engine's buffers by the names of our planes, without padding. Aliases them.

    Args:
        name: global name, for messages.
        param: a weight.
        recipe: what `recipe_of` finds for it.
        stale: whether a transpose counts that is marked as stale.

    Raises:
        ConfigError: it holds neither plane, or a buffer does not fit its shape.
    """
    weight: Any = param
    if recipe.block is None:
        transpose = weight._transpose if stale or not weight._transpose_invalid else None
        found = {"row_data": weight._data, "col_data": transpose}
        # One scale serves both planes.
        found |= {"row_scale" if weight._data is not None else "col_scale": weight._scale_inv}
    else:
        found = {
            "row_data": weight._rowwise_data,
            "row_scale": weight._rowwise_scale_inv,
            "col_data": weight._columnwise_data,
            "col_scale": weight._columnwise_scale_inv,
        }
    kept = {each: t for each, t in found.items() if found[f"{each[:3]}_data"] is not None}
    if not kept:
        raise ConfigError(f"parameter {name!r} holds neither plane; update_usage dropped both")
    shapes = _shapes((param.shape[0], param.shape[1]), recipe)
    return {each: _cut(name, each, t, shapes[each], recipe) for each, t in kept.items()}


def rebind(param: torch.Tensor, recipe: Recipe, data: Mapping[str, torch.Tensor]) -> None:
    """Have a weight keep its bytes elsewhere.

    Args:
        param: a weight.
        recipe: what `recipe_of` finds for it.
        data: "row_data" or "col_data" -> uint8, with the shape and bytes of what it holds.
    """
    weight: Any = param
    if recipe.block is None:
        weight._data = data.get("row_data", weight._data)
        weight._transpose = data.get("col_data", weight._transpose)
    else:
        weight._rowwise_data = data.get("row_data", weight._rowwise_data)
        weight._columnwise_data = data.get("col_data", weight._columnwise_data)


def _shapes(shape: tuple[int, int], recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """What Transformer Engine's buffers hold, without padding."""
    rows, cols = shape
    col_data = (cols, rows) if recipe.columns_transposed else shape
    if recipe.scales_are_codes:
        scales: tuple[tuple[int, ...], ...] = (rows, cols // MX_BLOCK), (rows // MX_BLOCK, cols)
    else:
        scales = row_scale_shape(shape, recipe), col_scale_shape(shape, recipe)
    return {"row_data": shape, "row_scale": scales[0], "col_data": col_data, "col_scale": scales[1]}


def _cut(
    name: str, each: str, tensor: torch.Tensor, shape: tuple[int, ...], recipe: Recipe
) -> torch.Tensor:
    """A buffer without its padding, as plain bytes or fp32."""
    part = tensor.detach()[tuple(slice(size) for size in shape)]
    if each.endswith("data") or recipe.scales_are_codes:
        part = part.view(torch.uint8)
    if tuple(part.shape) != shape:
        raise ConfigError(
            f"parameter {name!r}: Transformer Engine's {each} has shape {tuple(tensor.shape)}, "
            f"which does not hold {shape}; this version of it lays tensors out in another way"
        )
    return part


def as_stored(planes: Planes, each: str, target: torch.Tensor) -> torch.Tensor:
    """One matrix's part of our planes in the shape of a buffer; codes repeated where it asks."""
    source = planes.tensors()[each]
    if planes.recipe.format != "mxfp8-2d" or each.endswith("data"):
        return source.view(target.shape)
    rows, cols = row_scale_shape(planes.layout.shapes[0], planes.recipe)
    dim = 0 if each == "row_scale" else 1
    return source.view(rows, cols).repeat_interleave(MX_BLOCK, dim)


def as_ours(planes: Planes, each: str, source: torch.Tensor) -> torch.Tensor:
    """A buffer in the shape of our planes: of codes that are repeated, the first."""
    if planes.recipe.format != "mxfp8-2d" or each.endswith("data"):
        return source
    return source[::MX_BLOCK] if each == "row_scale" else source[:, ::MX_BLOCK]
