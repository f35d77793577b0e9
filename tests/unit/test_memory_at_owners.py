"""States that owners keep: balanced by their size under "whole" and "soap"; counted, not timed."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from megatron_lw.optimizer.owners import whole_cost
from megatron_lw.optimizer.plan import OwnershipPlan, PlanParam, plan_domain
from megatron_lw.presets import model_params, preset

ROW_BYTES = {"whole": 4, "soap": 4, "adamuon": 8}
"""Of an element in the rows, which are even: master, and momentum under "adamuon"."""
ENOUGH = 8
"""Matrices for each rank from which the promise of the design is kept."""


def kept_bytes(child: str, rows: int, cols: int) -> int:
    """What its owner keeps of a matrix in fp32; of "whole" one state like the matrix."""
    if child == "soap":
        return 4 * (2 * rows * cols + 2 * rows * rows + 2 * cols * cols)
    return 4 * rows * cols


def matrices(name: str, fused: bool, child: str) -> list[PlanParam]:
    return [
        PlanParam(
            name=param.name,
            numel=prod(param.shape),
            child=child,
            matrix=(param.shape[-2], param.shape[-1]),
            count=prod(param.shape[:-2]),
        )
        for param in model_params(preset(name), fused=fused)
        if param.kind == "matrix"
    ]


def shares(plan: OwnershipPlan, child: str) -> tuple[float, float]:
    """Bytes of the fullest rank over an even share: of all states, and of those at owners."""
    shapes = [plan.unit_of(i).matrices[0] for i in range(len(plan.owner))]
    each = [kept_bytes(child, *shape) for shape in shapes]
    kept = np.bincount(plan.owner, weights=each, minlength=plan.dp)
    rows = sum(ROW_BYTES[child] * prod(shape) for shape in shapes) / plan.dp
    return (rows + kept.max()) / (rows + kept.mean()), kept.max() / kept.mean()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("child", ROW_BYTES)
@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_states_of_a_rank_are_near_an_even_share(name: str, child: str, ranks: int) -> None:
    """Exact: 1.02 of it where ranks own several matrices; a matrix is not divided among owners."""
    for fused in (False, True):
        plan = plan_domain(matrices(name, fused, child), dp=ranks)
        share, kept = shares(plan, child)
        assert 1.0 <= share <= kept
        if len(plan.owner) >= ENOUGH * ranks:
            assert share <= 1.02
        else:
            assert share <= 1.08


def long_and_square(child: str) -> list[PlanParam]:
    """Matrices of one size, of which the square ones take eight times as long to orthogonalise."""
    shapes = {"a": (64, 64), "b": (8, 512)}
    numbers = {"a": 3, "b": 9}
    return [
        PlanParam(name=f"{kind}{i}.{child}", numel=4096, child=child, matrix=shapes[kind])
        for kind, number in numbers.items()
        for i in range(number)
    ]


def owned(plan: OwnershipPlan, child: str) -> list[int]:
    """Matrices of each rank, of those that a child steps."""
    mine = [plan.params[i].child == child for i in plan.matrix_param]
    return np.bincount(plan.owner[mine], minlength=plan.dp).tolist()


def test_the_same_matrices_have_other_owners_where_states_are_kept() -> None:
    """Exact: six and six by memory; by time the rank with one square matrix has all long ones."""
    assert owned(plan_domain(long_and_square("whole"), dp=2), "whole") == [6, 6]
    assert sorted(owned(plan_domain(long_and_square("muon"), dp=2), "muon")) != [6, 6]


def test_both_kinds_in_one_domain_are_balanced_apart() -> None:
    """Exact: neither fills the gaps that the other leaves."""
    both = plan_domain([*long_and_square("whole"), *long_and_square("muon")], dp=3)
    alone = plan_domain(long_and_square("muon"), dp=3)
    assert owned(both, "whole") == [4, 4, 4]
    assert both.bound == alone.bound
    assert sorted(both.loads.tolist()) == sorted(alone.loads.tolist())


@pytest.mark.parametrize(
    ("child", "shape", "expected"),
    [("whole", (3, 5), 15), ("soap", (3, 5), 2 * (15 + 9 + 25)), ("soap", (5, 3), 98)],
)
def test_what_a_matrix_weighs(child: str, shape: tuple[int, int], expected: int) -> None:
    """Exact: SOAP keeps two moments and two square matrices a side."""
    assert whole_cost(child, *shape) == expected
