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
_SIGNED_NAN = 0xFF
_POWER_M127 = 0x00400000  # the bits of 2^-127, a subnormal
_INT_OF = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
# Bits without the sign; what lifts the smallest NaN to just beyond the largest integer.
_MAGNITUDE = {torch.bfloat16: 0x7FFF, torch.float32: 0x7FFFFFFF}
_LIFT = {torch.bfloat16: 0x007F, torch.float32: 0x007FFFFF}


def _saturates(dtype: torch.dtype) -> bool:
    """Whether a cast to E4M3 on the CPU saturates, as it does from torch 2.13 on."""
    large = torch.tensor([449, 464, 465, 480, 1e4, torch.finfo(dtype).max, torch.inf], dtype=dtype)
    data = torch.cat([large, -large]).to(torch.float8_e4m3fn).view(torch.uint8)
    return data.tolist() == [0x7E] * len(large) + [0xFE] * len(large)


_CPU_SATURATES = _saturates(torch.bfloat16) and _saturates(torch.float32)


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
    bits = (amax * (1.0 / E4M3_MAX)).view(torch.int32)
    # A subnormal up to 2^-127 itself rounds up to code 0, one beyond to code 1.
    bits = bits * (bits > _POWER_M127)
    return bits.add_(0x7FFFFF).bitwise_right_shift_(23).clamp_max_(254).to(torch.uint8)


def code_multipliers(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(127 - code): what values are multiplied with before the cast. NaN for code 255."""
    return _powers(codes.int().neg_().add_(254), codes)


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(code - 127): what bytes are multiplied with after the cast. NaN for code 255."""
    return _powers(codes.int(), codes)


def _powers(exponent: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(exponent - 127) for int32 exponents 0 to 254, which are overwritten."""
    powers = exponent.bitwise_left_shift_(23).clamp_min_(_POWER_M127).view(torch.float32)
    return powers.masked_fill_(codes == 255, torch.nan)


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
    on_cpu = scaled.device.type == "cpu"
    if not (on_cpu and _CPU_SATURATES):
        scaled.clamp_(-E4M3_MAX, E4M3_MAX)
    out.view(torch.float8_e4m3fn).copy_(scaled)
    # torch may give NaN a sign, 0xFF. To look for one is cheap where nothing is waited for.
    if on_cpu and (not out.numel() or int(out.amax()) < _SIGNED_NAN):
        return
    # It alone wraps to 0 here; such arithmetic on bytes is several times as fast as a comparison
    # and a mask.
    is_nan = (out + 1).clamp_max_(1).sub_(1)
    out.bitwise_xor_(is_nan.bitwise_and_(0x80))


def numbers(data: torch.Tensor) -> torch.Tensor:
    """fp32 numbers of E4M3 bytes."""
    return data.view(torch.float8_e4m3fn).float()
