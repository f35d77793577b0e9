"""Weights of Transformer Engine's own classes, made under `te_stub`, and what their buffers say.

Values are decoded by the layout that Transformer Engine documents, not by code of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from megatron_lw.fp8.recipe import Recipe

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
FILL = 0x2B  # what padding holds, and buffers before they are written
RECIPES = {
    "tensor": Recipe(format="tensor"),
    "delayed": Recipe(format="delayed"),
    "block": Recipe(format="block"),
    "block-fp32": Recipe(format="block", fp32_scales=True),
    "mxfp8": Recipe(format="mxfp8"),
    "mxfp8-2d": Recipe(format="mxfp8-2d"),
}


def quantizer(te: Any, kind: str, **options: Any) -> Any:
    code = te.DType.kFloat8E4M3
    if kind == "tensor":
        return te.Float8CurrentScalingQuantizer(code, torch.device("cpu"), **options)
    if kind == "delayed":
        return te.Float8Quantizer(torch.ones(1), torch.ones(1), code, **options)
    if kind.startswith("block"):
        options = {"rowwise": True, "columnwise": True} | options
        power = kind == "block"
        return te.Float8BlockQuantizer(code, force_pow_2_scales=power, **options)
    return te.MXFP8Quantizer(code, with_2d_quantization=kind == "mxfp8-2d", **options)


def weight(
    te: Any, kind: str, shape: tuple[int, int] = (64, 96), without: str = "", **given: Any
) -> nn.Parameter:
    """A weight whose buffers, of the shapes that Transformer Engine gives them, hold `FILL`."""
    made = given.pop("quantizer", None) or quantizer(te, kind)
    common: dict[str, Any] = {"shape": shape, "dtype": BF16, "device": "cpu"}
    common |= {"fp8_dtype": te.DType.kFloat8E4M3, "quantizer": made} | given

    def filled(size: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.full(size, FILL, dtype=dtype)

    if kind in ("tensor", "delayed"):
        planes = {"data": filled(shape), "data_transpose": filled(shape[::-1])}
        common |= planes | {"fp8_scale_inv": filled((1,), torch.float32)}
        common |= {"row": {"data": None}, "col": {"data_transpose": None}}.get(without, {})
        return nn.Parameter(te.Float8Tensor(**common))
    for name, (size, dtype) in made.inner_tensor_specs(shape).items():
        dropped = without and name.startswith(f"_{without}")
        common[name.removeprefix("_")] = None if dropped else filled(tuple(size), dtype)
    if kind.startswith("block"):
        return nn.Parameter(te.Float8BlockwiseQTensor(**({"is_2D_scaled": True} | common)))
    return nn.Parameter(te.MXFP8Tensor(**({"with_gemm_swizzled_scales": False} | common)))


def theirs(param: Any, kind: str, plane: str) -> torch.Tensor:
    """The values of a plane, from Transformer Engine's buffers by its own layout."""
    rows, cols = param.shape
    if kind in ("tensor", "delayed"):
        data = param._data if plane == "row" else param._transpose.t()
        return (data.view(E4M3).float() * param._scale_inv).to(BF16)
    wise = "_rowwise" if plane == "row" else "_columnwise"
    data, scale = vars(param)[f"{wise}_data"], vars(param)[f"{wise}_scale_inv"]
    if kind.startswith("block"):
        if plane == "col":
            rows, cols = cols, rows
        full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        values = (data.view(E4M3).float() * full).to(BF16)
        return values if plane == "row" else values.t()
    factors = torch.exp2(scale.float() - 127)
    if plane == "row":
        full = factors[:rows, : cols // 32].repeat_interleave(32, 1)
    else:
        full = factors[: rows // 32, :cols].repeat_interleave(32, 0)
    return (data.view(E4M3).float() * full).to(BF16)


def keep_initial(te: Any, param: Any, values: torch.Tensor) -> None:
    """As `quantized_model_init(preserve_high_precision_init_val=True)` does."""
    from transformer_engine.pytorch.module import base

    base._attach_high_precision_init_val(param, values)
    assert isinstance(param.get_high_precision_init_val, MethodType)


def nvfp4(te: Any) -> torch.Tensor:
    empty = dict.fromkeys(
        ("rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_rowwise")
    )
    return te.NVFP4Tensor(
        shape=(64, 64),
        dtype=BF16,
        device="cpu",
        rowwise_data=torch.zeros(64, 32, dtype=torch.uint8),
        amax_columnwise=None,
        fp4_dtype=te.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        **empty,
    )


def grouped(te: Any) -> torch.Tensor:
    from transformer_engine.pytorch.tensor import GroupedTensor

    shapes = [(32, 32), (32, 32)]
    data = torch.zeros(2048, dtype=BF16)
    return GroupedTensor((64, 32), BF16, num_tensors=2, shapes=shapes, data=data)


def inner(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors in which Transformer Engine keeps a weight, by its own names; the data first."""
    names = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
    names += ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv")
    found = {name: vars(param).get(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def storage(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory that tensors lie in, whole, what they share once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())
