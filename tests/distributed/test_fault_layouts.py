"""One or two ranks fail in a layout with everything in it; all learn of it, and none waits.

Class *bitwise*: weights after a failed step, and after the step that follows it.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed import fault_layout_cases as cases
from tests.distributed.fault_layout_cases import AGREED, RANKS, UNTOUCHED
from tests.harness import run_ranks


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def recovered():
    return run_ranks(cases.skipped, RANKS)


@pytest.mark.parametrize(("overlap", "faulty"), [(False, (1,)), (True, (1, 2))])
def test_every_fault_reaches_all_ranks_and_no_collective_is_missed(overlap, faulty, recovered):
    found = run_ranks(cases.faults, RANKS, overlap, faulty)
    for rank in range(RANKS):
        assert found[rank]["none"].error == found[rank]["none"].again == ""
        assert not found[rank]["none"].kept
        for name in UNTOUCHED:
            seen = found[rank][name]
            assert seen.error == found[0][name].error
            assert re.match(r"StateError: \[rank 1\] .*nothing was updated", seen.error), name
            assert seen.kept and seen.again == "", name
            assert equal(seen.weights, recovered[rank].weights), name
        for name in AGREED:
            seen = found[rank][name]
            assert seen.error == found[0][name].error
            assert all(f"[rank {bad}] StateError: stage" in seen.error for bad in faulty), name
            assert seen.kept and "is broken" in seen.again, name


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_that_cannot_be_published_stops_every_rank(overlap):
    for error in run_ranks(cases.failed_publish, RANKS, overlap):
        assert "not published: [rank 1] StateError: chunk 0: bucket of" in error


@pytest.mark.parametrize("point", ["num_tokens", "average", "sequence-parallel sum"])
def test_a_failure_in_finalize_is_raised_there_and_by_step_on_all_ranks(point):
    for rank, (first, second, seen) in enumerate(run_ranks(cases.finalized_by_hand, RANKS, point)):
        assert first == second
        assert (re.match(r"StateError: chunk \d: ", first) is not None) == (rank == 1)
        assert re.match(r"StateError: \[rank 1\] stage 'reduce': chunk \d", seen.error)
        assert seen.kept and seen.again == ""


def test_masters_that_could_not_follow_loaded_weights_follow_them_at_the_next_step():
    plain = run_ranks(cases.failed_seed, RANKS, False)
    for rank, seen in enumerate(run_ranks(cases.failed_seed, RANKS, True)):
        assert "before the step: MemoryError" in seen.error and seen.again == ""
        assert equal(seen.weights, plain[rank].weights)


def test_a_failure_while_measuring_again_costs_one_step():
    for found in run_ranks(cases.careful_statistics, RANKS):
        for error, again in found:
            assert re.match(r"StateError: \[rank 2\] statistics of .*nothing was updated", error)
            assert again == ""


def test_an_interrupt_before_the_first_collective_breaks_too():
    first, second = cases.interrupted_before()
    assert first.startswith("KeyboardInterrupt")
    assert re.match(r"StateError: the optimizer is broken.*'reduce': KeyboardInterrupt", second)
