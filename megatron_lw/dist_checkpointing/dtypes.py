"""Which dtypes a checkpoint can hold, and what the safetensors format calls them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from megatron_lw.errors import CheckpointError

CODES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.int16: "I16",
        torch.uint16: "U16",
        torch.int32: "I32",
        torch.uint32: "U32",
        torch.int64: "I64",
        torch.uint64: "U64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.complex64: "C64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
)
"""Torch dtype -> its code in a safetensors header."""

_BY_NAME: Mapping[str, torch.dtype] = MappingProxyType(
    {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without its module, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype of a name.

    Args:
        name: such as "float32".
        where: what has it, for the message.

    Raises:
        CheckpointError: no checkpoint holds such a dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {name!r} is none of {', '.join(sorted(_BY_NAME))}")
    return dtype


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat view.

    One of a single element counts as contiguous whatever its strides say, and keeps them in `view`.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
