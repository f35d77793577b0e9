"""The named Newton-Schulz polynomials, and how they are resolved."""

from __future__ import annotations

import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.children.coefficients import COEFFICIENT_SETS, resolve_coefficients


def test_polar_express_is_divided_by_powers_of_its_safety_factor() -> None:
    """Numerical; the undivided triples of the paper, rounded to the four digits listed here."""
    raw = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]
    listed = COEFFICIENT_SETS["polar_express"].triples
    for triple, undivided in zip(listed[: len(raw)], raw, strict=True):
        divided = [value / 1.01**degree for value, degree in zip(undivided, (1, 3, 5), strict=True)]
        assert list(triple) == pytest.approx(divided, abs=1e-4)
    assert sum(listed[-1]) == 1.0  # the last one keeps one at one


def test_sets_cannot_be_changed() -> None:
    """The mapping is shared by every user in the process."""
    with pytest.raises(TypeError):
        COEFFICIENT_SETS["simple"] = COEFFICIENT_SETS["aol"]  # type: ignore[index]


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_steps_beyond_a_set(name: str) -> None:
    """Exact: some sets repeat their last triple, the others start again."""
    listed = COEFFICIENT_SETS[name].triples
    resolved = resolve_coefficients(name, 15)
    repeats = name in ("polar_express", "cans", "deepseekv4")
    for step, triple in enumerate(resolved.triples):
        inside = step < len(listed)
        assert triple == listed[step if inside else -1 if repeats else step % len(listed)]
    assert len(resolved.triples) == 15
    assert resolve_coefficients(name, 1).triples == listed[:1]
    assert resolved.row_prescale == (name == "aol")


def test_own_triples() -> None:
    """Exact: they are cycled."""
    first, second = (1.5, -0.5, 0.0), (2.0, -1.5, 0.5)
    assert resolve_coefficients([first, second], 3).triples == (first, second, first)


@pytest.mark.parametrize("steps", [0, -1, 16, 2.0, True, "5"])
def test_bad_steps(steps: object) -> None:
    """The value is named."""
    with pytest.raises(ConfigError, match=f"steps = {steps!r} .*1 to 15"):
        resolve_coefficients("simple", steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ("cubic", r"'cubic' is unknown.*simple, quintic, polar_express, cans, aol, deepseekv4"),
        ((), "empty"),
        (((1.0, 2.0),), r"\(1.0, 2.0\)"),
        (((1.0, 2.0, float("nan")),), r"\(1.0, 2.0, nan\)"),
    ],
    ids=str,
)
def test_bad_coefficients(coefficients: object, message: str) -> None:
    """The value is named, and what would do."""
    with pytest.raises(ConfigError, match=message):
        resolve_coefficients(coefficients, 5)  # type: ignore[arg-type]
