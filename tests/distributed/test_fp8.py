"""Quantised weights on the ranks. Class *bitwise*."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_lw.errors import StateError
from tests.distributed import fp8_cases
from tests.distributed.fp8_cases import RECIPES, same
from tests.harness import expect_failure_on_all, run_ranks


def equal_on_ranks(ranks: int, recipe: str, steps: int, **options: Any) -> list[dict[str, int]]:
    """Run on and off; all ranks must hold equal weights. Facts of the plan, a dictionary a rank."""
    results = run_ranks(fp8_cases.on_and_off, ranks, recipe, steps, options)
    weights = [
        {n: t for n, t in found.items() if " of bucket" not in n and "expert" not in n}
        for _, found in results
    ]
    for other in weights[1:]:
        same(weights[0], other)
    return [facts for facts, _ in results]


@pytest.mark.parametrize(
    ("ranks", "steps", "ep"), [(2, 5, 1), (3, 20, 1), (4, 20, 2)], ids=["2", "3", "4"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_gather_on_equals_off(recipe: str, ranks: int, steps: int, ep: int) -> None:
    """Losses, outputs, norms, gradients, masters, states, weights, both planes; overlap on and off.

    On four ranks dense weights have four copies and experts two.
    """
    facts = equal_on_ranks(ranks, recipe, steps, ep=ep)
    assert sum(each["cut"] for each in facts) > 0 and facts[0]["buckets"] >= 3


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-derived", "block", "delayed"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bf16_fp32_and_fp8_weights_in_one_bucket(recipe: str, ranks: int) -> None:
    """Adam's buckets hold vectors, an FP32 weight and quantised matrices side by side."""
    facts = equal_on_ranks(ranks, recipe, 3, optimizer="adam")
    assert facts[0]["mixed"] > 0


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-derived", "mxfp8-2d", "tensor"])
def test_gradients_in_bf16_leave_room_for_the_wire(recipe: str) -> None:
    equal_on_ranks(2, recipe, 3, grad_fp32=False)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recipe", ["mxfp8", "block"])
def test_experts_with_one_rank_or_two(recipe: str, ranks: int) -> None:
    """With one rank an expert is not sent, and still quantised from its masters."""
    equal_on_ranks(ranks, recipe, 3, ep=2)


WAYS = (
    "first",
    "zeroed",
    "in flight",
    "accumulating",
    "backward",
    "reduced",
    "evaluate",
    "stepped",
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "block", "delayed", "mxfp8-derived"])
def test_a_gather_at_any_moment_changes_nothing(recipe: str, overlap: bool) -> None:
    """Weights stay, gradients in the storage stay, zeros are zeros; evaluation changes nothing."""
    plain = run_ranks(fp8_cases.disturbed, 2, recipe, overlap, ())
    other = run_ranks(fp8_cases.disturbed, 2, recipe, overlap, WAYS)
    for one, two in zip(plain, other, strict=True):
        same(one, two)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_on_the_wire(ranks: int) -> None:
    shape = (1024, 1024)
    for recipe, bound in (("tensor", 1.01), ("block", 1.01), ("mxfp8-2d", 1.01), ("mxfp8", 2.01)):
        results = run_ranks(fp8_cases.bytes_per_weight, ranks, recipe, shape, True)
        assert all(0.99 < sent <= bound for sent, _ in results), recipe
        assert ranks == 2 or any(cut for _, cut in results)
        [off, *_] = run_ranks(fp8_cases.bytes_per_weight, ranks, recipe, shape, False)
        assert off[0] == pytest.approx(2.0, abs=0.001)  # padding between rows
    [rows, *_] = run_ranks(fp8_cases.bytes_per_weight, ranks, "mxfp8-derived", shape, True)
    assert 1.03 < rows[0] < 1.04


def test_bytes_of_a_step_are_those_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "fp8.md"
    _, table = page.read_text(encoding="utf-8").split("| weights | gradients, reduce-scatter |")
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", table, re.MULTILINE)
    assert {name.strip('"') for name, *_ in rows} == {"BF16", *RECIPES} - {"block-fp32"}
    for name, *cells in rows:
        recipe = None if name == "BF16" else name.strip('"')
        for sent in run_ranks(fp8_cases.step_bytes, 2, recipe, True):
            found = [sent.pop(each, 0) for each in ("reduce_scatter", "all_reduce", "all_gather")]
            assert found == [int(cell.replace(",", "")) for cell in cells], name
            assert not sent


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_masters_start_from_the_values_before_quantisation(recipe: str, ranks: int) -> None:
    run_ranks(fp8_cases.seeded, ranks, recipe)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("mxfp8", "mxfp8"), ("block", "block"), ("mxfp8", "tensor")]
)
def test_a_checkpoint_gives_the_bytes_of_its_masters(
    saved: str, loaded: str, tmp_path: Path
) -> None:
    run_ranks(fp8_cases.resumed, 2, str(tmp_path), saved, loaded)


def test_check_finds_a_flipped_bit_in_either_plane() -> None:
    for where in ("row_data", "col_scale"):
        for text in run_ranks(fp8_cases.flipped, 2, where):
            assert f"{where} of parameter 'experts.1.weight'" in text, text


def test_a_plain_state_dict_is_quantised() -> None:
    run_ranks(fp8_cases.loaded_values, 2)


def test_a_master_that_is_not_finite_is_named_before_it_is_quantised() -> None:
    expect_failure_on_all(
        fp8_cases.infinite_master, 2, StateError, r"a master of parameter 'mid\.weight'"
    )
