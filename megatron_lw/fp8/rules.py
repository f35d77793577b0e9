"""The arithmetic of FP8: from a maximum to a scale, from scaled values to bytes, and back.

The rules are those of Transformer Engine (`ptx.cuh`, `recipe_common.cuh`) for E4M3, whose largest
value is 448. Every function is element by element and gives the same bits on CPU and GPU:

- The maximum of a block ignores NaN. Maxima are compared as integers, as the bits of non-negative
  floats are in their order.
- E8M0 (MXFP8): code = ceil(log2(amax * fp32(1/448))) + 127, from the bits: the exponent, plus one
  if any bit of the mantissa is set. Zero gives 0, infinity 254. Byte b stands for 2^(b - 127), 255
  for NaN.
- FP32: scale = 448 / amax; 1 where amax is 0 or not finite; a scale that overflows is the largest
  finite number of the values' dtype (per tensor: of fp32). Powers of two: mantissa cleared.
- A byte is E4M3(value * scale), to nearest even, saturating (infinity too); NaN is 0x7F.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
_INT_OF = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
# Bits without the sign; what lifts the smallest NaN to just beyond the largest integer.
_MAGNITUDE = {torch.bfloat16: 0x7FFF, torch.float32: 0x7FFFFFFF}
_LIFT = {torch.bfloat16: 0x007F, torch.float32: 0x007FFFFF}


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of |values|, NaN below all numbers; for `largest`.

    Args:
        values: bf16 or fp32.

    Returns:
        int16 or int32, a new tensor of the same shape.
    """
    bits = values.view(_INT_OF[values.dtype])
    return (bits & _MAGNITUDE[values.dtype]).add_(_LIFT[values.dtype])


def largest(maxima: torch.Tensor) -> torch.Tensor:
    """The fp32 number of each maximum of `magnitudes`; 0 where all were NaN."""
    dtype = torch.bfloat16 if maxima.dtype == torch.int16 else torch.float32
    lift = _LIFT[dtype]
    return (maxima.clamp_min(lift) - lift).view(dtype).float()


def exponent_codes(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 codes of blocks.

    Args:
        amax: fp32, not NaN.

    Returns:
        uint8 of the same shape.
    """
    scale = amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=amax.device)
    bits = scale.view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # A subnormal up to 2^-127 itself rounds up to code 0, one beyond to code 1.
    up = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    return (exponent + up.int()).clamp_max_(254).to(torch.uint8)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^(exponent - 127) for int32 exponents 0 to 254."""
    return torch.where(exponent == 0, 0x00400000, exponent << 23).view(torch.float32)


def code_multipliers(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(127 - code): what values are multiplied with before the cast. NaN for code 255."""
    exponent = codes.int()
    power = _power_of_two((254 - exponent).clamp_min_(0))
    return power.masked_fill_(exponent == 255, torch.nan)


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(code - 127): what bytes are multiplied with after the cast. NaN for code 255."""
    exponent = codes.int()
    return _power_of_two(exponent.clamp_max(254)).masked_fill_(exponent == 255, torch.nan)


def fp32_scales(
    amax: torch.Tensor, *, overflow: float, powers_of_two: bool = False, top: float = E4M3_MAX
) -> torch.Tensor:
    """FP32 scales: what values are multiplied with before the cast.

    Args:
        amax: fp32.
        overflow: the scale where 448 / amax is too large for fp32.
        powers_of_two: round scales down to a power of two.
        top: the largest number of the format, where it is not E4M3.

    Returns:
        fp32 of the same shape; its reciprocal is what is stored.
    """
    scale = torch.div(torch.full_like(amax, top), amax)
    scale = torch.where(scale.isinf(), overflow, scale)
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
    if powers_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def cast(scaled: torch.Tensor, out: torch.Tensor) -> None:
    """Write E4M3 bytes of scaled values.

    Args:
        scaled: bf16 or fp32; changed.
        out: uint8 of the same shape; contiguous or not.
    """
    scaled.clamp_(-E4M3_MAX, E4M3_MAX)  # torch before 2.13 does not saturate
    made = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    # torch gives NaN a sign, 0xFF. It alone wraps to 0 here; such arithmetic on bytes is several
    # times as fast as a comparison and a mask.
    is_nan = (made + 1).clamp_max_(1).sub_(1)
    torch.bitwise_xor(made, is_nan.bitwise_and_(0x80), out=out)


def numbers(data: torch.Tensor) -> torch.Tensor:
    """fp32 numbers of E4M3 bytes."""
    return data.view(torch.float8_e4m3fn).float()
