"""The Newton-Schulz iteration: values, bits and range."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torch_muon

from megatron_lw.optimizer.children.coefficients import COEFFICIENT_SETS
from megatron_lw.optimizer.children.ns_workspace import workspace_numel
from tests.unit.orthogonal import (
    DTYPES,
    HALF,
    TOLERANCE,
    USABLE,
    newton_schulz,
    oracle,
    power_law,
    relative_error,
)

SHAPES = [(1, 1), (1, 40), (40, 1), (17, 17), (96, 200), (200, 96)]


# Values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), USABLE, ids=str)
def test_equals_the_oracle(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Numerical, at the precision of the compute dtype.

    The polynomials of `cans` are steep at one, where the singular value of a vector is: there one
    rounding comes out 1000 times as large.
    """
    engine = newton_schulz(name, dtype=dtype)
    tolerance = TOLERANCE[dtype] * (1000 if name == "cans" else 1)
    for x in (torch.randn(shape, dtype=torch.float64), power_law(*shape)):
        expected = oracle(x, engine.coefficients)
        assert relative_error(engine(x), expected) < tolerance
        assert relative_error(engine(x[None])[0], expected) < tolerance


@pytest.mark.parametrize(
    ("name", "steps", "lowest", "highest"),
    [
        ("simple", 5, 0.682, 1.134),
        ("quintic", 5, 0.978, 1.032),
        ("polar_express", 5, 0.870, 1.124),
        ("polar_express", 8, 1.0, 1.0),
        ("cans", 5, 0.886, 1.12),
        ("aol", 4, 0.987, 1.012),
        ("deepseekv4", 10, 1.0, 1.0005),
    ],
)
def test_singular_values_reach_the_interval_of_the_set(
    name: str, steps: int, lowest: float, highest: float
) -> None:
    """Numerical; the intervals were measured elsewhere, on a 256 x 1024 Gaussian matrix in fp32."""
    values = torch.linalg.svdvals(newton_schulz(name, steps)(torch.randn(256, 1024)))
    assert float(values.min()) == pytest.approx(lowest, abs=0.01)
    assert float(values.max()) == pytest.approx(highest, abs=0.01)


def test_zero_rows_stay_zero_and_change_nothing() -> None:
    """Numerical for the rest, exact for the zeros; also where rows are scaled one by one."""
    for name in ("quintic", "aol"):
        engine = newton_schulz(name, dtype=torch.float64)
        x = torch.randn(12, 40, dtype=torch.float64)
        padded = torch.cat([x, torch.zeros(4, 40, dtype=torch.float64)])
        result = engine(padded)
        assert torch.equal(result[12:], torch.zeros_like(result[12:]))
        assert relative_error(result[:12], engine(x)) < 1e-12


# Bits


@pytest.mark.parametrize(
    "shape",
    [
        (24, 24),
        (33, 47),
        (64, 256),
        (256, 64),
        (129, 3000),
        (3000, 129),
        (300, 300),
        (512, 96),
        (520, 700),
        (700, 520),
    ],
    ids=str,
)
def test_bits_of_torch_muon(shape: tuple[int, int]) -> None:
    """Bitwise against `torch.optim.Muon`, alone, in a batch, and into every kind of `out`."""
    engine = newton_schulz("simple", dtype=torch.bfloat16)
    (triple,) = COEFFICIENT_SETS["simple"].triples
    for scale in (1e-4, 1.0, 30.0):
        x = torch.randn(2, *shape) * scale
        for one in (x[0], x[0].bfloat16(), x[0].mT.contiguous().mT):
            expected = torch_muon(one.clone(), triple, 5, 1e-7)
            out = torch.empty(shape, dtype=torch.bfloat16)
            assert torch.equal(engine(one), expected)
            assert torch.equal(engine(one, out=out), expected)
            assert torch.equal(engine(one, out=out.mT.contiguous().mT), expected)
        expected = torch.stack([torch_muon(one.clone(), triple, 5, 1e-7) for one in x])
        assert torch.equal(engine(x), expected)
        outs = [torch.empty(shape, dtype=torch.bfloat16) for _ in x]
        engine.orthogonalise(list(x), outs)
        assert torch.equal(torch.stack(outs), expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (3, 8), (7, 33), (16, 16), (16, 64)])
def test_bits_of_torch_muon_for_tiny_matrices(shape: tuple[int, int]) -> None:
    """Bitwise alone. In batches, torch's kernels sum short sides up to 16 in another order."""
    engine = newton_schulz("simple", dtype=torch.bfloat16)
    (triple,) = COEFFICIENT_SETS["simple"].triples
    for x in torch.randn(20, *shape):
        assert torch.equal(engine(x), torch_muon(x, triple, 5, 1e-7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (64, 32), (64, 256), (288, 256)], ids=str)
def test_a_batch_has_the_bits_of_its_matrices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bitwise on CPU builds with oneDNN and MKL: short sides above 16, on 64-byte boundaries."""
    engine = newton_schulz(dtype=dtype)
    x = torch.randn(9, *shape)
    alone = torch.stack([engine(one) for one in x])
    assert torch.equal(engine(x), alone)
    for size in (1, 2, 9):
        workspace = torch.empty(workspace_numel(size, *shape), dtype=dtype)
        outs = [torch.empty(shape, dtype=dtype) for _ in x]
        engine.orthogonalise(list(x), outs, workspace)
        assert torch.equal(torch.stack(outs), alone)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (3, 8), (7, 33), (33, 7), (16, 16)], ids=str)
def test_a_batch_of_tiny_matrices_is_close_to_its_matrices(shape: tuple[int, int]) -> None:
    """Numerical: torch multiplies tiny batches with another kernel than tiny matrices."""
    x = torch.randn(9, *shape)
    engine = newton_schulz()
    alone = torch.stack([engine(one) for one in x])
    assert relative_error(engine(x), alone) < 1e-5


# Range


@pytest.mark.parametrize(("name", "dtype"), USABLE, ids=str)
def test_zero_gives_exactly_zero(name: str, dtype: torch.dtype) -> None:
    """Bitwise, also beside a matrix that is not zero."""
    engine = newton_schulz(name, dtype=dtype)
    x = torch.stack([torch.zeros(16, 24), torch.randn(16, 24)])
    result = engine(x)
    assert torch.equal(result[0], torch.zeros_like(result[0]))
    assert torch.equal(engine(x[0]), torch.zeros_like(result[0]))
    assert float(result[1].abs().max()) > 0.1


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_no_set_that_may_run_in_half_precision_diverges(dtype: torch.dtype) -> None:
    """Numerical: singular values where rounding is worst, one above the interval, or all equal."""
    for name, usable in USABLE:
        if usable is not dtype:
            continue
        engine = newton_schulz(name, dtype=dtype)
        for rows, columns in ((1, 1), (1, 30), (8, 8), (16, 64)):
            column, row = torch.randn(20, rows, 1), torch.randn(20, 1, columns)
            orthogonal = torch.linalg.qr(torch.randn(20, columns, rows)).Q.mT
            for x in (column @ row, orthogonal, torch.randn(20, rows, columns)):
                assert float(torch.linalg.matrix_norm(engine(x).double(), 2).max()) < 1.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_power_of_two_as_scale_changes_no_bit(dtype: torch.dtype) -> None:
    """Bitwise, over the whole range in which no element is subnormal; in one batch all at once."""
    engine = newton_schulz(dtype=dtype)
    x = torch.randn(24, 32)
    scales = torch.tensor([2.0**e for e in (-100, -70, -41, -39, -8, 0, 8, 39, 41, 70, 120)])
    expected = engine(x)
    for result in engine(x * scales[:, None, None]):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_and_huge_inputs_give_the_update_of_their_unscaled_selves(dtype: torch.dtype) -> None:
    """Numerical, since these scales are no powers of two; each matrix of a batch by itself."""
    x = torch.randn(24, 32, dtype=torch.float64)
    engine = newton_schulz(dtype=dtype)
    expected = oracle(x, engine.coefficients)
    scales = torch.tensor([1e-20, 1.0, 1e20, 1e-30, 1e30], dtype=torch.float64)
    for source in (torch.float32, torch.bfloat16):
        for result in engine((x * scales[:, None, None]).to(source)):
            assert relative_error(result, expected) < max(TOLERANCE[dtype], 0.02)
    for scale in (1e-300, 1e-160, 1e160, 1e300):
        assert relative_error(engine(x * scale), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_finite_elements(source: torch.dtype) -> None:
    """Numerical: the norm is not even a number of the dtype; 16 by 16 equal elements, rank one."""
    largest = min(torch.finfo(source).max, torch.finfo(torch.bfloat16).max)
    x = torch.full((16, 16), largest, dtype=source)
    for dtype in DTYPES:
        engine = newton_schulz(dtype=dtype)
        expected = oracle(torch.ones(16, 16), engine.coefficients)
        assert relative_error(engine(x), expected) < max(TOLERANCE[dtype], 0.02)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so_and_stays_where_it_is(dtype: torch.dtype, bad: float) -> None:
    """Exact: every element of that matrix is NaN, the neighbours keep their bits."""
    for name in ("quintic", "aol"):
        engine = newton_schulz(name, dtype=dtype)
        x = torch.randn(3, 16, 32)
        expected = engine(x)
        x[1, 3, 5] = bad
        result = engine(x)
        assert result[1].isnan().all()
        assert engine(x[1]).isnan().all()
        assert torch.equal(result[::2], expected[::2])
