"""Newton-Schulz on Gram matrices, and batches that are padded with zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.children.gram_space import is_long, restarts_before
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import (
    MAX_PADDING,
    group_into_batches,
    workspace_numel,
)
from megatron_lw.optimizer.workspace import BATCH_BELOW
from tests.unit.orthogonal import (
    HALF,
    TOLERANCE,
    USABLE,
    newton_schulz,
    oracle,
    power_law,
    relative_error,
)

WIDE_ENOUGH = [torch.float16, torch.float32, torch.float64]
IN_GRAM = [(name, dtype) for name, dtype in USABLE if dtype is not torch.bfloat16]
UNEQUAL = [(24, 40), (24, 33), (48, 24), (24, 48), (24, 24), (44, 24)]


# Gram space


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6, 15])
@pytest.mark.parametrize(("name", "dtype"), IN_GRAM, ids=str)
def test_gram_space_equals_the_oracle(name: str, dtype: torch.dtype, steps: int) -> None:
    """Numerical, at the precision of the compute dtype, before, at and after each restart."""
    engine = newton_schulz(name, steps, dtype, "gram")
    tolerance = TOLERANCE[dtype] * (5 if dtype is torch.float16 else 20 if name == "cans" else 3)
    large = [(BATCH_BELOW + 3, 2 * BATCH_BELOW + 9)] if steps in (3, 5) else []
    for shape in [(16, 32), (64, 16), (40, 200), *large]:
        for x in (torch.randn(shape, dtype=torch.float64), power_law(*shape)):
            expected = oracle(x, engine.coefficients)
            assert relative_error(engine(x), expected) < tolerance
            assert relative_error(engine(x[None])[0], expected) < tolerance


def test_gram_space_is_for_long_matrices_only() -> None:
    """Bitwise: below 1:2 it would cost more, so the usual products are taken."""
    standard, gram = newton_schulz(), newton_schulz(iteration="gram")
    for shape, long in (((32, 63), False), ((63, 32), False), ((32, 64), True), ((64, 32), True)):
        x = torch.randn(shape)
        assert is_long(*shape) is long
        assert torch.equal(gram(x), standard(x)) is not long
        assert relative_error(gram(x), standard(x)) < 1e-4


def test_restarts_come_before_the_third_step_and_every_third_from_there() -> None:
    """Exact."""
    assert [step for step in range(15) if restarts_before(step)] == [2, 5, 8, 11, 14]


def test_the_restart_is_what_keeps_gram_space_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numerical: singular values that fall as 1/k^2; with it as exact as the usual products."""
    left, values, right = torch.linalg.svd(power_law(64, 256), full_matrices=False)
    x = left * values**2 @ right
    engine = newton_schulz(dtype=torch.float16, iteration="gram")
    expected = oracle(x, engine.coefficients)
    usual = relative_error(newton_schulz(dtype=torch.float16)(x), expected)
    assert relative_error(engine(x), expected) < 1.5 * usual < 0.05
    module = "megatron_lw.optimizer.children.gram_space.restarts_before"
    monkeypatch.setattr(module, lambda step: False)
    assert not relative_error(engine(x), expected) < 0.5


def test_bf16_is_refused_with_the_reason() -> None:
    """The setting and the dtype are named, and what would do."""
    with pytest.raises(ConfigError, match=r"'gram' is not safe in torch\.bfloat16.*use float16"):
        newton_schulz(dtype=torch.bfloat16, iteration="gram")
    with pytest.raises(ConfigError, match="iteration = 'fast' is unknown; use standard or gram"):
        newton_schulz(iteration="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(20, 60), (60, 20), (4, 20, 60), (4, 60, 20)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_gram_space_in_every_kind_of_out_and_workspace(shape: tuple[int, ...], steps: int) -> None:
    """Bitwise; the input is not written, NaN stands for what a call before left behind."""
    engine = newton_schulz("aol", steps, torch.float32, "gram")
    x = torch.randn(shape)
    before = x.clone()
    expected = engine(x)
    batch, rows, columns = (1, *shape)[-3:]
    workspace = torch.full((workspace_numel(batch, rows, columns),), torch.nan)
    contiguous = torch.empty(shape)
    transposed = torch.empty(x.mT.shape).mT
    for out in (contiguous, transposed, torch.empty(shape, dtype=torch.float64)):
        assert torch.equal(engine(x, out=out, workspace=workspace).float(), expected)
        workspace.fill_(torch.nan)
    assert torch.equal(x, before)
    assert engine(x, out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", WIDE_ENOUGH, ids=str)
def test_range_in_gram_space(dtype: torch.dtype) -> None:
    """Zero bitwise; tiny and huge ones as their unscaled selves, numerical; NaN stays alone."""
    engine = newton_schulz(dtype=dtype, iteration="gram")
    x = torch.randn(4, 16, 64)
    expected = engine(x)
    assert torch.equal(engine(torch.zeros(16, 64)), torch.zeros(16, 64, dtype=dtype))
    for scale in (1e-20, 1e20):
        assert relative_error(engine(x * scale), expected) < TOLERANCE[dtype] + 1e-5
    x[1, 3, 5] = torch.nan
    assert engine(x)[1].isnan().all()
    assert torch.equal(engine(x)[2:], expected[2:])


# Padded batches


def of_shapes(dtype: torch.dtype) -> list[Tensor]:
    return [power_law(*shape).to(dtype) * 10.0**i for i, shape in enumerate(UNEQUAL)]


@pytest.mark.parametrize(("name", "dtype"), USABLE, ids=str)
@pytest.mark.parametrize("fitting", [1, 3, len(UNEQUAL)])
def test_padded_batches_equal_the_oracle(name: str, dtype: torch.dtype, fitting: int) -> None:
    """Numerical, with a workspace for 1, 3 or all; zeros do not count in any matrix's norm."""
    engine = newton_schulz(name, dtype=dtype)
    workspace = torch.empty(workspace_numel(fitting, 24, 48), dtype=dtype)
    matrices = of_shapes(torch.float32)
    before = [x.clone() for x in matrices]
    outs = [torch.full_like(x, torch.nan, dtype=dtype) for x in matrices]
    engine.orthogonalise_padded(matrices, outs, workspace)
    for x, out, kept in zip(matrices, outs, before, strict=True):
        assert torch.equal(x, kept)
        assert relative_error(out, oracle(x, engine.coefficients)) < TOLERANCE[dtype]


def test_padding_is_exact_in_algebra() -> None:
    """Numerical, 1e-12 in float64, in place, in Gram space too."""
    for iteration in ("standard", "gram"):
        engine = newton_schulz(dtype=torch.float64, iteration=iteration)
        matrices = of_shapes(torch.float64)
        alone = [engine(x) for x in matrices]
        engine.orthogonalise_padded(matrices, matrices)
        for x, expected in zip(matrices, alone, strict=True):
            assert relative_error(x, expected) < 1e-12


def test_padded_batches_refuse_what_does_not_fit() -> None:
    """The first matrix that differs is named."""
    engine = newton_schulz()
    x = torch.randn(4, 6)
    with pytest.raises(ConfigError, match=r"\(5, 6\) beside .*\(4, 6\); group them by short side"):
        engine.orthogonalise_padded([x, torch.randn(5, 6)], [x, torch.empty(5, 6)])
    with pytest.raises(ConfigError, match="2 matrices, 1 outs"):
        engine.orthogonalise_padded([x, x], [x])
    with pytest.raises(ConfigError, match="budget_numel = 7"):
        engine.orthogonalise_padded([x], [x], torch.empty(7))
    engine.orthogonalise_padded([], [])
    engine.orthogonalise_padded([torch.empty(0, 6)], [torch.empty(0, 6)])


def test_batches_hold_every_matrix_once_and_little_padding() -> None:
    """Exact: by shape, or by short side with at most a fifth of zeros."""
    large = (BATCH_BELOW, BATCH_BELOW)
    shapes = [(24, 40), (24, 300), large, (40, 24), (24, 290), (16, 40), large, (24, 40), (24, 100)]
    assert group_into_batches(shapes, pad=False) == [[0, 7], [1], [2, 6], [3], [4], [5], [8]]
    padded = group_into_batches(shapes, pad=True)
    assert sorted(map(sorted, padded)) == [[0, 3, 7], [1, 4], [2, 6], [5], [8]]
    assert group_into_batches([], pad=True) == []
    for batch in padded:
        longest = max(max(shapes[i]) for i in batch)
        assert sum(max(shapes[i]) for i in batch) >= (1 - MAX_PADDING) * longest * len(batch)
        assert len({min(shapes[i]) for i in batch}) == 1


def test_float16_results_are_kept_in_float32() -> None:
    """Exact: momenta of 1e-9 are zero in float16, and would be lost in the exchange."""
    kept = {dtype: NewtonSchulz(newton_schulz().coefficients, dtype=dtype).input_dtype
            for dtype in [*HALF, torch.float32]}  # fmt: skip
    assert kept == {
        torch.bfloat16: torch.bfloat16,
        torch.float16: torch.float32,
        torch.float32: torch.float32,
    }
