"""What kind of weight a parameter is: plain, or quantised."""

from __future__ import annotations

import torch

from megatron_lw.fp8.tensor import QuantisedTensor


def address(param: torch.Tensor) -> int:
    """Where a parameter lies: its own memory, or the row-wise plane of a quantised one."""
    if isinstance(param, QuantisedTensor):
        return param.planes.row_data.data_ptr()
    return param.data_ptr()
