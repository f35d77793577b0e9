"""Symmetric products in strips against the whole products."""

from __future__ import annotations

import pytest
import torch

from megatron_lw.optimizer.children import symmetric
from megatron_lw.optimizer.children.symmetric import gram_of, multiply_add, strips_of
from tests.unit.orthogonal import newton_schulz, relative_error

SHAPES = [(256, 300), (320, 320), (387, 900), (512, 768), (643, 700), (770, 1540)]


def products(shape: tuple[int, int], dtype: torch.dtype, tall: bool) -> list[list[torch.Tensor]]:
    """In strips and whole: the Gram matrix, and a polynomial of it."""
    x = torch.randn(shape, dtype=dtype)
    x = (x.mT.contiguous().mT if tall else x) / x.norm()
    gram = x @ x.mT
    update = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
    ours = [torch.full_like(gram, torch.nan) for _ in range(2)]
    gram_of(x, ours[0], strips_of(ours[0], 256))
    strips = strips_of(ours[1], 256)
    multiply_add(gram, gram, gram, ours[1], strips, beta=-4.775, alpha=2.0315)
    return [ours, [gram, update]]


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strips_have_the_bits_of_the_whole_product_in_bf16(
    shape: tuple[int, int], tall: bool
) -> None:
    """Bitwise on CPU builds with oneDNN or MKL, sizes that divide into strips and others."""
    ours, whole = products(shape, torch.bfloat16, tall)
    assert all(torch.equal(one, other) for one, other in zip(ours, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strips_are_close_and_symmetric_to_the_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Numerical; what is mirrored is exact. Every element is written."""
    ours, whole = products(shape, dtype, False)
    for one, other in zip(ours, whole, strict=True):
        assert relative_error(one, other) < 8 * torch.finfo(dtype).eps
        assert torch.equal(one[-64:, :64], one[:64, -64:].mT)


def test_how_much_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact: five eighths of the products at 512, everything below `least` and in batches."""
    counted: list[int] = []
    multiply = torch.mm

    def mm(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        counted.append(out.numel())
        return multiply(x, y, out=out)

    monkeypatch.setattr(symmetric.torch, "mm", mm)
    for rows, least, expected in (
        (512, 512, 5 / 8),
        (256, 256, 3 / 4),
        (384, 256, 2 / 3),
        (511, 512, 1),
        (128, 1, 1),
    ):
        counted.clear()
        out = torch.empty(rows, rows)
        gram_of(torch.randn(rows, rows), out, strips_of(out, least))
        assert sum(counted) == expected * rows * rows
    counted.clear()
    out = torch.empty(2, 512, 512)
    gram_of(torch.randn(2, 512, 512), out, strips_of(out, 256))
    assert not counted


def test_a_matrix_that_is_not_finite_is_so_in_every_element() -> None:
    """Exact: also in strips."""
    x = torch.randn(512, 600)
    x[300, 7] = torch.nan
    assert newton_schulz(dtype=torch.bfloat16)(x).isnan().all()
