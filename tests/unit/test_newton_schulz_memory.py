"""The Newton-Schulz iteration: what it reads, writes, allocates and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.children.coefficients import resolve_coefficients
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import carve, max_batch, workspace_numel
from megatron_lw.optimizer.workspace import BATCH_BELOW
from tests.unit.orthogonal import DTYPES, HALF, newton_schulz, oracle, relative_error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (BATCH_BELOW, BATCH_BELOW)], ids=str)
def test_the_input_is_never_written(
    shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype
) -> None:
    """Bitwise (pytorch #190597: momenta in the compute dtype were normalised in place)."""
    engine = newton_schulz("aol", 1, dtype=dtype)
    given = torch.randn(2, *shape).to(source)
    for x in (given, given.mT.contiguous().mT):
        before, version = x.clone(), x._version
        engine(x)
        engine(x[0])
        engine(x[0], out=torch.empty(shape, dtype=dtype))
        engine.orthogonalise(list(x), [torch.empty(shape, dtype=dtype) for _ in x])
        assert torch.equal(x, before)
        assert x._version == version


def test_the_result_may_replace_the_input() -> None:
    """Bitwise, in place by the caller's wish: `out` is x."""
    for shape in ((20, 30), (30, 20), (BATCH_BELOW, BATCH_BELOW + 32)):
        engine = newton_schulz(dtype=torch.bfloat16)
        x = torch.randn(3, *shape).bfloat16()
        expected = torch.stack([engine(one) for one in x])
        whole, parts = x.clone(), list(x.clone())
        assert engine(whole, out=whole) is whole
        engine.orthogonalise(parts, parts)
        assert torch.equal(whole, expected)
        assert torch.equal(torch.stack(parts), expected)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (20, 20), (4, 20, 30), (4, 30, 20)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_kind_of_out_takes_the_same_bits(shape: tuple[int, ...], steps: int) -> None:
    """Bitwise; what lies around a view stays as it was."""
    engine = newton_schulz(steps=steps, dtype=torch.bfloat16)
    x = torch.randn(shape)
    expected = engine(x)
    assert expected.shape == x.shape
    assert expected.dtype is torch.bfloat16

    flat = torch.full((x.numel() + 2,), 7.0, dtype=torch.bfloat16)
    wide = torch.full((*shape[:-1], shape[-1] + 3), 7.0, dtype=torch.bfloat16)
    spread = torch.full((*shape, 2), 7.0, dtype=torch.float64)
    transposed = torch.empty(x.mT.shape, dtype=torch.bfloat16)
    for out in (flat[1:-1].view(shape), wide[..., :-3], spread[..., 0], transposed.mT):
        assert engine(x, out=out) is out
        assert torch.equal(out, expected.to(out.dtype))
    for untouched in (flat[:: flat.numel() - 1], wide[..., -3:], spread[..., 1]):
        assert torch.equal(untouched, torch.full_like(untouched, 7.0))


def test_every_kind_of_input_view() -> None:
    """Numerical: strided, offset and expanded inputs."""
    engine = newton_schulz()
    base = torch.randn(3, 50, 60)
    views: Iterable[Tensor] = (
        base[1, ::2, 1::3],
        base[0].T[5:45],
        base[:, 0, :],
        base[0, :1].expand(5, 60),
        base[0].flip(0)[3:],
    )
    for x in views:
        assert relative_error(engine(x), oracle(x, engine.coefficients)) < 2e-5
    strided = engine(base[:, ::2, ::2].mT)
    for result, x in zip(strided, base, strict=True):
        assert relative_error(result, oracle(x[::2, ::2].T, engine.coefficients)) < 2e-5


@pytest.mark.parametrize("shape", [(160, 256), (256, 160), (4, 64, 128), (512, 512)], ids=str)
def test_no_allocation_of_the_size_of_the_input(shape: tuple[int, ...]) -> None:
    """Exact: what the CPU allocator hands out during a call with `out` and `workspace`."""
    engine = newton_schulz("aol", dtype=torch.bfloat16)
    x, out = torch.randn(shape), torch.empty(shape, dtype=torch.bfloat16)
    batch, rows, columns = (1, *shape)[-3:]
    workspace = torch.empty(workspace_numel(batch, rows, columns), dtype=torch.bfloat16)

    def largest(call: Callable[[], object]) -> int:
        call()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            call()
        return max(int(event.self_cpu_memory_usage) for event in profile.events())

    nbytes = out.numel() * out.element_size()
    assert largest(lambda: engine(x)) >= nbytes
    assert largest(lambda: engine(x, out=out, workspace=workspace)) < nbytes / 4


def test_the_parts_of_a_workspace_start_on_cache_lines() -> None:
    """Exact: MKL sums in another order where an operand does not."""
    for shape in ((3, 5), (7, 33, 9), (64, 64)):
        parts = carve(None, shape, torch.float32, torch.device("cpu"))
        for part in (*parts.wide, parts.gram, parts.update):
            assert part.storage_offset() * part.element_size() % 64 == 0


def test_a_gradient_is_not_tracked() -> None:
    """A parameter may be passed as it is."""
    x = torch.randn(8, 9, requires_grad=True)
    assert not newton_schulz()(x).requires_grad


@pytest.mark.parametrize("shape", [(0, 4, 5), (0, 5), (5, 0), (2, 0, 5)], ids=str)
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    """A rank may own nothing."""
    assert newton_schulz()(torch.empty(shape)).shape == shape
    newton_schulz().orthogonalise([], [])


def test_the_largest_batch_is_the_largest_that_fits() -> None:
    """Exact, around the budget of each batch size."""
    for rows, columns in ((1, 1), (3, 5), (64, 256), (200, 10)):
        for batch in (1, 2, 7):
            budget = workspace_numel(batch, rows, columns)
            found = max_batch(rows, columns, budget)
            assert found >= batch
            assert workspace_numel(found, rows, columns) <= budget
            assert workspace_numel(found + 1, rows, columns) > budget
    with pytest.raises(ConfigError, match=r"budget_numel = 99 .* at least 512"):
        max_batch(3, 64, 99)


def test_a_workspace_full_of_another_shapes_leftovers_changes_no_bit() -> None:
    """Bitwise; NaN stands for whatever a call before left behind."""
    engine = newton_schulz("aol", dtype=torch.bfloat16)
    workspace = torch.full((workspace_numel(3, 48, 96),), torch.nan, dtype=torch.bfloat16)
    for shape in ((3, 48, 96), (48, 96), (96, 48), (2, 20, 31), (3, 96, 48), (1, 7)):
        x = torch.randn(shape)
        expected = engine(x).clone()
        assert torch.equal(engine(x, workspace=workspace), expected)
        workspace.fill_(torch.nan)
        assert torch.equal(engine(x, out=torch.empty(shape), workspace=workspace), expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_cans_is_refused_in_half_precision(dtype: torch.dtype) -> None:
    """It diverges there: without the refusal a 1 x 1 matrix gave 1e11 in bf16."""
    with pytest.raises(ConfigError, match=rf"{dtype} .*\(cans\) diverge; use float32"):
        newton_schulz("cans", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_bad_compute_dtype(dtype: torch.dtype) -> None:
    """The value is named, and what would do."""
    with pytest.raises(ConfigError, match=f"{dtype} is not supported.*bfloat16"):
        NewtonSchulz(resolve_coefficients("simple", 5), dtype=dtype)


def test_bad_arguments() -> None:
    """The argument and its value are named."""
    engine = newton_schulz()
    x = torch.randn(4, 6)
    numel = workspace_numel(1, 4, 6)
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: engine(x[0]), r"x: .*\(6,\)"),
        (lambda: engine(x[None, None]), r"x: .*\(1, 1, 4, 6\)"),
        (lambda: engine(x.int()), r"x: torch.int32"),
        (lambda: engine(x, out=x.mT), r"out: .*\(6, 4\).*\(4, 6\)"),
        (lambda: engine(x, out=x.int()), r"out: torch.int32"),
        (lambda: engine(x, workspace=torch.empty(numel - 1)), f"{numel - 1} .*needs {numel}"),
        (lambda: engine(x, workspace=torch.empty(2 * numel)[::2]), "stride 2.*contiguous"),
        (lambda: engine(x, workspace=torch.empty(numel).half()), "float16.*float32"),
        (lambda: engine(x, workspace=torch.empty(1, numel)), "2-D"),
        (lambda: engine.orthogonalise([x, x], [x]), "2 matrices, 1 outs"),
        (lambda: engine.orthogonalise([x, x.mT], [x, x.mT]), r"\(6, 4\) beside .*\(4, 6\)"),
        (lambda: engine.orthogonalise([x, x.half()], [x, x]), "float16 .*beside torch.float32"),
        (lambda: engine.orthogonalise([x[None]], [x[None]]), r"matrices: .*\(1, 4, 6\)"),
        (lambda: engine.orthogonalise([x], [x], torch.empty(7)), "budget_numel = 7"),
    ]
    for call, message in bad:
        with pytest.raises(ConfigError, match=message):
            call()
