"""The only module that imports Transformer Engine: its fused Adam, and its quantised weights.

Three of its tensors hold a matrix as our formats do. Their bytes and scales are ours, padded:

| its class, and what quantises it | recipe | row-wise, column-wise scales there |
|---|---|---|
| Float8Tensor, Float8CurrentScalingQuantizer | tensor | one fp32 [1] for both |
| Float8Tensor, Float8Quantizer | delayed | one fp32 [1] for both |
| Float8BlockwiseQTensor, scales of 128x128 | block | fp32, rows padded to 4 numbers |
| MXFP8Tensor | mxfp8 | E8M0 [M, K/32] and [M/32, K], padded to 128 and 4 |
| MXFP8Tensor with 2D quantisation | mxfp8-2d | the same, each code 32 times |

Names and shapes are those of Transformer Engine 2.20.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_lw.errors import ConfigError
from megatron_lw.fp8.planes import Planes, col_scale_shape, row_scale_shape
from megatron_lw.fp8.quantise import Plane, dequantise
from megatron_lw.fp8.recipe import MX_BLOCK, Recipe

_PACKAGE = "transformer_engine"


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


def is_theirs(param: torch.Tensor) -> bool:
    """Whether the class of a tensor comes from Transformer Engine; `recipe_of` says which it is."""
    return type(param).__module__.partition(".")[0] == _PACKAGE


def recipe_of(name: str, param: torch.Tensor) -> Recipe | None:
    """The recipe of a weight of Transformer Engine; None if it is none of its tensors.

    Its class is compared, not what it can do. Imports Transformer Engine only where the tensor
    shows that it is loaded.

    Args:
        name: global name, for messages.
        param: any parameter.

    Raises:
        ConfigError: a kind that has no recipe here (FP4, several weights in one tensor, others),
            or settings under which its bytes are not those of a recipe.
    """
    if not is_theirs(param):
        return None
    kind = type(param)
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor")
    finders: dict[type, Callable[[str, Any, Any], Recipe]] = {
        tensors.Float8Tensor: _per_tensor_recipe,
        tensors.Float8BlockwiseQTensor: _block_recipe,
        tensors.MXFP8Tensor: _mxfp8_recipe,
    }
    label = f"parameter {name!r}, a {kind.__name__} of Transformer Engine,"
    if kind not in finders:
        raise ConfigError(
            f"{label} is of a kind that is not supported; those are "
            + ", ".join(each.__name__ for each in finders)
        )
    weight: Any = param
    if param.dtype != torch.bfloat16:
        raise ConfigError(f"{label} has dtype {param.dtype}; build the model in bfloat16")
    if weight._quantizer is None:
        raise ConfigError(f"{label} has no quantizer, which says how its scales are made")
    _expect(label, "format", weight._fp8_dtype.name, "kFloat8E4M3")
    recipe = finders[kind](label, weight, tensors)
    recipe.check_shape(label, tuple(param.shape))
    return recipe


def write_planes(weights: Mapping[str, torch.Tensor], planes: Planes) -> None:
    """Copy bytes and scales into Transformer Engine's own buffers, for many weights in one call.

    Both planes of a weight change together. Where Transformer Engine keeps one plane, that one
    does, and a transpose that it would make from it later is marked as stale. Addresses stay.

    Args:
        weights: global name -> weight, in the order of the matrices.
        planes: of those weights.

    Raises:
        ConfigError: a weight is not of the planes' recipe, or a buffer does not fit its shape.
            Nothing is copied then.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, (name, weight) in enumerate(weights.items()):
        if recipe_of(name, weight) != planes.recipe:
            raise ConfigError(
                f"parameter {name!r} is no longer kept as {planes.recipe}; build the optimizer anew"
            )
        parts = planes.one(index)
        for each, target in buffers(name, weight).items():
            targets.append(target)
            sources.append(_as_stored(parts, each, target))
    with torch.no_grad():
        # A list of one dtype is copied in one call.
        for dtype in {target.dtype for target in targets}:
            chosen = [i for i, target in enumerate(targets) if target.dtype == dtype]
            torch._foreach_copy_([targets[i] for i in chosen], [sources[i] for i in chosen])
    for weight in weights.values():
        if planes.recipe.block is None:
            held: Any = weight
            held._transpose_invalid = held._transpose is None


def take_initial(name: str, param: torch.Tensor) -> torch.Tensor:
    """The values from which a master starts. Whatever Transformer Engine kept is let go of.

    Call it on every rank, also where a row holds nothing of the weight: each keeps a copy.

    Args:
        name: global name, for messages.
        param: a weight for which `recipe_of` finds a recipe.

    Returns:
        bf16 `[M, K]` on the weight's device: what was quantised, if that was kept and is asked for
        the first time; else the values of the row-wise plane, or of the only one.
    """
    recipe = _known_recipe(name, param)
    kept = take_kept(param)
    if kept is not None:
        return kept.to(device=param.device, dtype=torch.bfloat16)
    planes = Planes.empty([(param.shape[0], param.shape[1])], recipe, param.device)
    return dequantise(planes, torch.bfloat16, read_planes(name, param, planes)[0])


def take_kept(param: torch.Tensor) -> torch.Tensor | None:
    """What Transformer Engine kept of the values before quantisation; it lets go of them."""
    get, clear = (vars(param).get(f"{each}_high_precision_init_val") for each in ("get", "clear"))
    kept: torch.Tensor | None = None if get is None else get()
    if clear is not None:
        clear()
    return kept


def read_planes(name: str, param: torch.Tensor, planes: Planes) -> tuple[Plane, ...]:
    """Copy what a weight holds into planes of one matrix; those that it does not hold stay.

    Args:
        name: global name, for messages.
        param: a weight for which `recipe_of` finds a recipe.
        planes: of its shape and recipe.

    Returns:
        The planes that it holds, the row-wise one first.

    Raises:
        ConfigError: it holds neither plane.
    """
    found = buffers(name, param, stale=False)
    for each, source in found.items():
        planes.tensors()[each].copy_(_as_ours(planes, each, source).reshape(-1))
    both: tuple[Plane, ...] = ("row", "col")
    return tuple(plane for plane in both if f"{plane}_data" in found)


def buffers(name: str, param: torch.Tensor, *, stale: bool = True) -> dict[str, torch.Tensor]:
    """Transformer Engine's buffers by the names of our planes, without padding. Aliases them.

    Args:
        name: global name, for messages.
        param: a weight for which `recipe_of` finds a recipe.
        stale: whether a transpose counts that is marked as stale.

    Raises:
        ConfigError: it holds neither plane, or a buffer does not fit its shape.
    """
    weight: Any = param
    recipe = _known_recipe(name, param)
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


def _known_recipe(name: str, param: torch.Tensor) -> Recipe:
    recipe = recipe_of(name, param)
    if recipe is None:
        raise ConfigError(f"parameter {name!r} is no tensor of Transformer Engine")
    return recipe


def _per_tensor_recipe(label: str, weight: Any, tensors: Any) -> Recipe:
    quantizer = weight._quantizer
    if type(quantizer) is tensors.Float8Quantizer:
        return Recipe(format="delayed")
    if type(quantizer) is not tensors.Float8CurrentScalingQuantizer:
        raise _unknown_quantizer(label, quantizer)
    _expect(label, "with_amax_reduction", quantizer.with_amax_reduction, False)
    _expect(label, "force_pow_2_scales", quantizer.force_pow_2_scales, False)
    _expect(label, "amax_epsilon", quantizer.amax_epsilon, 0.0)
    return Recipe(format="tensor")


def _block_recipe(label: str, weight: Any, tensors: Any) -> Recipe:
    quantizer = weight._quantizer
    if type(quantizer) is not tensors.Float8BlockQuantizer:
        raise _unknown_quantizer(label, quantizer)
    _expect(label, "is_2D_scaled", weight._is_2D_scaled, True)
    _expect(label, "amax_epsilon", quantizer.amax_epsilon, 0.0)
    return Recipe(format="block", fp32_scales=not quantizer.force_pow_2_scales)


def _mxfp8_recipe(label: str, weight: Any, tensors: Any) -> Recipe:
    quantizer = weight._quantizer
    if type(quantizer) is not tensors.MXFP8Quantizer:
        raise _unknown_quantizer(label, quantizer)
    _expect(label, "with_gemm_swizzled_scales", weight._with_gemm_swizzled_scales, False)
    return Recipe(format="mxfp8-2d" if quantizer.with_2d_quantization else "mxfp8")


def _expect(label: str, setting: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise ConfigError(f"{label} has {setting}={value!r}; only {wanted!r} is supported")


def _unknown_quantizer(label: str, quantizer: object) -> ConfigError:
    return ConfigError(
        f"{label} has a {type(quantizer).__name__}, whose rules are not known here; use a recipe "
        "of Transformer Engine that has one of its own quantizers"
    )


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


def _as_stored(planes: Planes, each: str, target: torch.Tensor) -> torch.Tensor:
    """One matrix's part of our planes in the shape of a buffer; codes repeated where it asks."""
    source = planes.tensors()[each]
    if planes.recipe.format != "mxfp8-2d" or each.endswith("data"):
        return source.view(target.shape)
    rows, cols = row_scale_shape(planes.layout.shapes[0], planes.recipe)
    dim = 0 if each == "row_scale" else 1
    return source.view(rows, cols).repeat_interleave(MX_BLOCK, dim)


def _as_ours(planes: Planes, each: str, source: torch.Tensor) -> torch.Tensor:
    """A buffer in the shape of our planes: of codes that are repeated, the first."""
    if planes.recipe.format != "mxfp8-2d" or each.endswith("data"):
        return source
    return source[::MX_BLOCK] if each == "row_scale" else source[:, ::MX_BLOCK]
