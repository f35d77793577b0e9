"""The product with a quantised weight: row-wise plane forward, column-wise plane backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_lw.errors import ConfigError
from megatron_lw.fp8 import rules
from megatron_lw.fp8.quantise import dequantise

if TYPE_CHECKING:
    from megatron_lw.fp8.tensor import QuantisedTensor

Matmul = Literal["auto", "dequantise", "scaled_mm"]
"""Multiply values in bf16, or bytes in FP8 with the activations quantised as well."""

_SCALED_MULTIPLE = 16  # also the alignment of the bytes
_SCALED_CAPABILITY = (8, 9)


def linear(
    x: torch.Tensor,
    weight: QuantisedTensor,
    bias: torch.Tensor | None = None,
    matmul: Matmul = "auto",
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: bf16 `[..., K]`; another dtype under autocast, which is cast.
        weight: `[N, K]`.
        bias: bf16 `[N]`.
        matmul: "dequantise" multiplies the weight's values in bf16; "scaled_mm" multiplies bytes,
            with `x` quantised per tensor to E4M3 and its gradient to E5M2; "auto" takes it on GPUs
            that have it, for per-tensor formats, and sides and addresses that 16 divides.

    Raises:
        ConfigError: `x` is not bf16, or "scaled_mm" with a format that has a scale for each block.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
    if x.dtype != torch.bfloat16:
        raise ConfigError(f"the input of an FP8 linear layer is {x.dtype}; cast it to bfloat16")
    if matmul == "scaled_mm" and weight.recipe.block is not None:
        raise ConfigError(
            f"matmul='scaled_mm' is for formats with one scale a matrix, not "
            f"{weight.recipe.format!r}; leave it at 'auto'"
        )
    scaled = matmul == "scaled_mm" or (matmul == "auto" and _has_scaled_mm(weight))
    scaled = scaled and x.numel() > 0  # an expert without tokens has no maximum to quantise by
    function = _ScaledLinear if scaled else _DequantisedLinear
    made: torch.Tensor = function.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return made


def _has_scaled_mm(weight: QuantisedTensor) -> bool:
    """Whether the GPU multiplies this weight's bytes."""
    if weight.device.type != "cuda" or weight.recipe.block is not None:
        return False
    capable = torch.cuda.get_device_capability(weight.device) >= _SCALED_CAPABILITY
    # In a bucket it may lie behind a matrix of any size.
    places = (weight.planes.row_data.data_ptr(), weight.planes.col_data.data_ptr())
    return capable and not any(number % _SCALED_MULTIPLE for number in (*weight.shape, *places))


def _weight_and_bias_grads(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients in bf16, as those of a bf16 layer."""
    flat = grad.reshape(-1, grad.shape[-1])
    needs = ctx.needs_input_grad
    weight = flat.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
    return weight, flat.sum(0) if needs[2] else None


class _DequantisedLinear(torch.autograd.Function):
    """Values of the weight in bf16."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: QuantisedTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return functional.linear(x, dequantise(weight.planes, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [grad] = grads
        [x] = ctx.saved_tensors
        inputs = None
        if ctx.needs_input_grad[0]:
            inputs = grad @ dequantise(ctx.weight.planes, grad.dtype, "col")
        return inputs, *_weight_and_bias_grads(ctx, grad, x)


class _ScaledLinear(torch.autograd.Function):
    """Bytes times bytes, for weights with one scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: QuantisedTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        rows, cols = weight.shape
        data, scale = _per_tensor(x.reshape(-1, cols), torch.float8_e4m3fn)
        other = weight.planes.row_data.view(rows, cols)
        out = _product(data, scale, other, weight.planes.row_scale)
        return (out if bias is None else out + bias).view(*x.shape[:-1], rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [grad] = grads
        [x] = ctx.saved_tensors
        inputs = None
        if ctx.needs_input_grad[0]:
            rows, cols = ctx.weight.shape
            data, scale = _per_tensor(grad.reshape(-1, rows), torch.float8_e5m2)
            other = ctx.weight.planes.col_data.view(cols, rows)
            inputs = _product(data, scale, other, ctx.weight.planes.col_scale).view(x.shape)
        return inputs, *_weight_and_bias_grads(ctx, grad, x)


def _per_tensor(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 data and fp32 inverse scale of an activation or gradient, from its own maximum."""
    top = torch.finfo(kind).max
    amax = rules.largest(rules.magnitudes(x.contiguous()).amax().view(1))
    scale = rules.fp32_scales(amax, overflow=torch.finfo(torch.float32).max, top=top)
    return (x.float() * scale).clamp_(-top, top).to(kind), scale.reciprocal()


def _product(
    left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor
) -> torch.Tensor:
    """bf16 `left @ right.T`, for uint8 `right` `[N, K]`."""
    return torch._scaled_mm(
        left,
        right.view(torch.float8_e4m3fn).t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=torch.bfloat16,
    )
