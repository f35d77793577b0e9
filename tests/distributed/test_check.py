"""`optimizer.check()` finds what one rank has wrong, on all ranks, by name; and nothing otherwise.

Class *bitwise*: a check changes nothing.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.check_cases import (
    FAULTS,
    at_every_moment,
    broken,
    orders,
    out_of_step,
    parallel,
    run_faults,
)
from tests.harness import run_ranks

RANKS = 3


@pytest.fixture(scope="module")
def messages():
    """What every rank raised for each fault of rank 1, and after it was undone."""
    return run_ranks(run_faults, RANKS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_named_on_all(messages, fault):
    texts = [found[fault] for found, _ in messages]
    assert texts == [texts[0]] * RANKS
    for part in FAULTS[fault][1]:
        assert part in texts[0]
    assert all(after[fault] == "" for _, after in messages), "the fault is gone with its cause"


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_found_between_any_two_calls(overlap):
    """Always the same few collectives; refused where it could meet a reduce under way."""
    results = run_ranks(at_every_moment, 2, overlap)
    for visits, _ in results:
        assert [v.message for v in visits] == [""] * len(visits)
        assert all(v.unchanged for v in visits)
        assert all(v.calls == {"all_gather_object": 6, "all_reduce": 1} for v in visits)
    assert [v.moment for v in results[0][0]] == [v.moment for v in results[1][0]]
    mine, other = ({v.states for v in visits} for visits, _ in results)
    assert overlap or mine != other, "a gradient that is missing on one rank must be no fault"
    assert all(torch.equal(w, results[1][1][n]) for n, w in results[0][1].items())


@pytest.mark.parametrize(
    ("sizes", "ranks", "faults"),
    [
        ({"tensor": 2}, 2, {"router_weight": "router_weight", "norm_weight": "norm_weight"}),
        ({"tensor": 2, "expert": 2, "expert_tensor": 2}, 4, {"e0_bias": "e0_bias"}),
        ({"tensor": 2, "expert": 2, "expert_tensor": 1}, 2, {"router_weight": "router_weight"}),
        ({"pipeline": 2}, 2, {"emb_weight": "tied weight 'embedding'"}),
    ],
    ids=["T2", "T2E2", "T2E2ET1", "P2"],
)
def test_states_of_copies_that_drift_apart(sizes, ranks, faults):
    """Long before the weights differ: a state of one copy is written, and no weight moves."""
    for clean, messages, after in run_ranks(parallel, ranks, sizes, list(faults)):
        assert clean == after == ""
        for name, label in faults.items():
            pattern = rf"replicas: (momentum|exp_avg) of .*{label}.* differs over group '\w+'"
            assert re.search(pattern, messages[name])
            assert re.search(r"first at element 0: .*; 0\.375 on rank 1", messages[name])


def test_a_broken_optimizer_says_so_at_once():
    (text,) = run_ranks(broken, 1)
    assert text.startswith("StateError: the optimizer is broken: stage 'muon'")


def test_a_call_that_one_rank_has_not_made_is_counted():
    for before, message, after in run_ranks(out_of_step, 2):
        assert before == after == ""
        assert re.search(
            r"collectives: all_gather over group 'dp': (\d+) calls on rank 0; \d+ calls on rank 1",
            message,
        )


def test_the_order_of_calls_is_compared_inside_a_block():
    for nothing, order, more, log in run_ranks(orders, 2):
        assert nothing == ""
        assert "over group 'dp' is all_reduce on rank 0; all_gather on rank 1" in order
        assert "calls on" not in order, "the counts are equal"
        assert "all_reduce over group 'dp': 0 calls on rank 0; 1 calls on rank 1" in more
        assert log == [None], "nothing is recorded outside of a block"
