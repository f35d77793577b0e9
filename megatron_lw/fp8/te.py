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
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import Plane, dequantise
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.te_buffers import as_ours, as_stored, buffers, rebind

_PACKAGE = "transformer_engine"
_ALIGNMENT = 16
"""Bytes; matrix products in FP8 need both operands to begin at a multiple of it."""


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


def require_recipe(name: str, param: torch.Tensor) -> Recipe:
    """As `recipe_of`.

    Raises:
        ConfigError: also if it is none of its tensors.
    """
    recipe = recipe_of(name, param)
    if recipe is None:
        raise ConfigError(f"parameter {name!r} is no tensor of Transformer Engine")
    return recipe


def move_data(name: str, param: torch.Tensor, planes: Planes) -> None:
    """Move the bytes of a weight into planes of ours, of which its buffers are views afterwards.

    As an assignment to `.data` does with a plain parameter. It holds the planes that it held, with
    the same bytes. Scales stay where they are, laid out with padding.

    Args:
        name: global name, for messages.
        param: a weight for which `recipe_of` finds a recipe.
        planes: of its shape and recipe; the bytes of what it holds are written. Where they would
            begin between multiples of 16 bytes, the weight keeps a buffer of its own.

    Raises:
        ConfigError: it holds neither plane, or a buffer does not fit its shape.
    """
    moved: dict[str, torch.Tensor] = {}
    for each, source in buffers(name, param, planes.recipe).items():
        target = planes.tensors()[each]
        if each.endswith("data") and target.data_ptr() % _ALIGNMENT == 0:
            moved[each] = target.view(source.shape)
            moved[each].copy_(source)
    rebind(param, planes.recipe, moved)


def write_planes(weights: Mapping[str, torch.Tensor], planes: Planes) -> None:
    """Give Transformer Engine's buffers bytes and scales, of many weights in one call.

    Both planes of a weight change together. Where Transformer Engine keeps one plane, that one
    does, and a transpose that it would make from it later is marked as stale. A buffer that is a
    view of these planes holds its bytes already; any other gets a copy. Addresses stay.

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
        for each, target in buffers(name, weight, planes.recipe).items():
            source = as_stored(parts, each, target)
            if source.data_ptr() != target.data_ptr():
                targets.append(target)
                sources.append(source)
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
    recipe = require_recipe(name, param)
    initial = take_kept(param)
    if initial is not None:
        return initial.to(device=param.device, dtype=torch.bfloat16)
    planes = Planes.empty([(param.shape[0], param.shape[1])], recipe, param.device)
    return dequantise(planes, torch.bfloat16, read_planes(name, param, planes)[0])


def take_kept(param: torch.Tensor) -> torch.Tensor | None:
    """What Transformer Engine kept of the values before quantisation; it lets go of them."""
    get, clear = (vars(param).get(f"{each}_high_precision_init_val") for each in ("get", "clear"))
    initial: torch.Tensor | None = None if get is None else get()
    if clear is not None:
        clear()
    return initial


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
    found = buffers(name, param, planes.recipe, stale=False)
    for each, source in found.items():
        planes.tensors()[each].copy_(as_ours(planes, each, source).reshape(-1))
    both: tuple[Plane, ...] = ("row", "col")
    return tuple(plane for plane in both if f"{plane}_data" in found)


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
