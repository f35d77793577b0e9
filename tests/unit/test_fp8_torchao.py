"""MXFP8 against torchao 0.18's RCEIL mode, where that is installed. Class *bitwise*.

The two rules differ in blocks that are not ordinary, which `docs/fp8.md` lists: torchao flushes
blocks of scale code 0 to zero, poisons a block that holds a NaN, and may differ for infinity.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import quantise_bucket
from megatron_lw.fp8.recipe import Recipe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
SHAPE = (128, 512)


def theirs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scale codes of the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing torchao warns about is not ours
        formats: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        mode = formats.ScaleCalculationMode.RCEIL
        scale, data = formats.to_mx(values, torch.float8_e4m3fn, 32, mode)
    return data.view(torch.uint8), scale.view(torch.uint8)


def ours(values: torch.Tensor) -> Planes:
    shape = (values.shape[0], values.shape[1])
    return quantise_bucket(values.reshape(-1), [shape], [0], Recipe(format="mxfp8"))


def wide(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 60, SHAPE, generator=generator)
    return (torch.randn(SHAPE, generator=generator) * torch.exp2(exponents)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_planes_equal(dtype: torch.dtype) -> None:
    values = wide(dtype)
    planes = ours(values)
    data, scale = theirs(values)
    assert torch.equal(planes.row_data.view(SHAPE), data)
    assert torch.equal(planes.row_scale.view(scale.shape), scale)
    assert scale.unique().numel() > 20
    data, scale = theirs(values.t().contiguous())
    assert torch.equal(planes.col_data.view(SHAPE).t(), data)
    assert torch.equal(planes.col_scale.view(scale.t().shape).t(), scale)


def test_the_known_differences() -> None:
    values = torch.zeros(32, 32, dtype=torch.float32)
    values[0] = 2.0**-125  # code 0
    values[1, 0], values[1, 1] = torch.nan, 1.0
    planes = ours(values)
    data, scale = theirs(values)
    assert planes.row_scale[:2].tolist() == [0, 119]
    assert scale[:2].flatten().tolist() == [0, 255]
    assert planes.row_data.view(32, 32)[0].unique().tolist() == [0x48]  # 4 x 2^-127
    assert data[0].unique().tolist() == [0]
