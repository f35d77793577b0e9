"""One rank fails, is stuck, dies or disagrees: the others learn of it, by name, and none goes on.

Class *bitwise*: a step that fails before its publish leaves the weights as they were.
"""

from __future__ import annotations

import re

import pytest
import torch

from megatron_lw import ConfigError, DDPConfig, OptimizerConfig
from megatron_lw.errors import CommunicationError
from tests.distributed import fault_cases
from tests.distributed.fault_cases import FAULTY, RANKS, Outcome
from tests.harness import expect_failure_on_all, run_ranks

AGREED = {
    "momentum": r"stage 'muon'.*bucket of '[abc]_weight': MemoryError: injected",
    "Newton-Schulz": r"stage 'muon'.*bucket of '[abc]_weight': MemoryError: injected",
    "scales": r"recording scales: MemoryError: injected",
    "apply": r"stage 'muon'.*bucket of '[abc]_weight': MemoryError: injected",
    "adam": r"stage 'adam': MemoryError: injected",
}
UNTOUCHED = {
    "bindings": r"before the step: MemoryError: injected",
    "reduce": r"stage 'reduce': chunk 0: bucket of 'b_weight': MemoryError: injected",
    "average": r"stage 'reduce': chunk 0: bucket of 'b_weight': MemoryError: injected",
    "stats": r"statistics of bucket of '[abcd]_\w+': MemoryError: injected",
}
STUCK = {
    "reduce": r"reduce-scatter over group '\w+' \(reduce bucket of '[abcd]_\w+'\)",
    "stats": r"all-reduce over group 'grad_stats' \(gradient statistics\)",
    "momentum": r"all-to-all over group '\w+' \(.*bucket of '[abc]_weight'\)",
    "agree": r"all-reduce over group 'control' \(agreement on failures\)",
    "publish": r"all-gather over group '\w+' \(publish bucket of '[abcd]_\w+'\)",
}


def is_broken(outcome: Outcome) -> None:
    """Nothing can be done with it any more: the same on every rank."""
    backward = outcome.later["backward"]
    assert backward == "" or backward.startswith("CommunicationError"), "gradients go unused"
    assert outcome.later["step"].startswith("StateError: the optimizer is broken")
    assert outcome.later["start_param_sync"].startswith("StateError: the masters cannot be")
    assert outcome.later["check"].startswith("StateError: the optimizer is broken")


@pytest.fixture(scope="module")
def exceptions():
    return run_ranks(fault_cases.exceptions, RANKS, [*UNTOUCHED, *AGREED])


@pytest.mark.parametrize("point", AGREED)
def test_an_exception_in_a_child_reaches_all_ranks(exceptions, point):
    """At once: no timeout of 60 s is waited for; and the weights are those of the last step."""
    outcomes = [found[point] for found in exceptions]
    assert all(o.is_ours for o in outcomes)
    assert {o.error for o in outcomes} == {outcomes[0].error}
    assert re.search(rf"\[rank {FAULTY}\].*{AGREED[point]}", outcomes[0].error)
    assert all(o.weights_kept for o in outcomes)
    assert sum(o.matrices for o in outcomes) > 0, "the other ranks have done their part"
    for outcome in outcomes:
        is_broken(outcome)


@pytest.mark.parametrize("point", UNTOUCHED)
def test_an_exception_before_anything_is_written_costs_one_step(exceptions, point):
    """Every rank raises, at once and by name; the next step is taken."""
    outcomes = [found[point] for found in exceptions]
    assert all(o.is_ours and o.weights_kept for o in outcomes)
    assert {o.error for o in outcomes} == {outcomes[0].error}
    assert re.search(
        rf"\[rank {FAULTY}\] {UNTOUCHED[point]}.*nothing was updated", outcomes[0].error
    )
    for outcome in outcomes:
        assert set(outcome.later.values()) == {""}


def test_a_rank_without_new_gradients_is_named_by_all():
    for outcome, again in run_ranks(fault_cases.step_without_backward, RANKS):
        assert outcome.is_ours and outcome.weights_kept
        for error in (outcome.error, again):
            assert re.match(r"StateError: \[rank \d\] before the step: bucket of.*zero_grad", error)
        assert f"[rank {FAULTY}]" in outcome.error
        assert set(outcome.later.values()) == {""}


def test_a_rank_that_cannot_publish_stops_every_rank_in_the_same_step():
    for outcome in run_ranks(fault_cases.failed_publish, RANKS):
        assert re.match(
            rf"StateError: the weights are not published: \[rank {FAULTY}\] StateError: chunk 0: "
            r"bucket of '\w+': MemoryErr",
            outcome.error,
        )
        is_broken(outcome)


def test_a_failed_collective_fails_for_every_reader():
    for rank, texts in enumerate(run_ranks(fault_cases.waited_twice, RANKS)):
        for text in texts if rank != FAULTY else ():
            assert text.startswith("CommunicationError: all-gather over group 'dp'")


def test_groups_have_the_timeout_that_torch_was_initialised_with():
    for default, silent, asked in run_ranks(fault_cases.timeouts, RANKS):
        assert default == silent != 1800.0
        assert asked == 7.0


@pytest.fixture(scope="module")
def stuck():
    return run_ranks(fault_cases.stuck, RANKS, list(STUCK))


@pytest.mark.parametrize("point", STUCK)
def test_a_stuck_rank_is_noticed_within_the_timeout_of_the_group(stuck, point):
    """2 s here; torch's own default is half an hour. The message names collective and bucket."""
    for rank, found in enumerate(stuck):
        outcome = found[point]
        assert outcome.error.startswith("CommunicationError: ")
        assert outcome.is_ours
        if rank != FAULTY:
            assert re.search(STUCK[point], outcome.error)
        is_broken(outcome)


def test_an_interrupted_rank_is_broken_and_so_are_the_others():
    for rank, outcome in enumerate(run_ranks(fault_cases.interrupted, RANKS)):
        if rank == FAULTY:
            assert outcome.error.startswith("KeyboardInterrupt"), "it is not swallowed"
            assert "stage 'muon': KeyboardInterrupt" in outcome.later["step"]
        else:
            assert re.search(STUCK["momentum"], outcome.error)
        is_broken(outcome)


def test_a_rank_that_forgot_zero_grad_says_so_and_the_others_name_the_reduce():
    for rank, (first, second) in enumerate(run_ranks(fault_cases.forgotten_zero_grad, RANKS)):
        if rank == FAULTY:
            assert re.match(r"StateError: a gradient of '\w+' arrived while.*zero_grad", first)
        else:
            assert first.startswith("CommunicationError: ")
            assert re.search(STUCK["reduce"], first)
            assert second.startswith("StateError: the optimizer is broken")


def test_settings_that_differ_are_found_by_all_and_nothing_is_lost():
    for error, weights_kept, later in run_ranks(fault_cases.different_settings, RANKS):
        assert re.match(r"PlanMismatchError: .*different settings", error)
        assert weights_kept
        assert later == "", "the next step, with equal settings, is taken"


@pytest.mark.parametrize(
    ("make", "settings", "remedy"),
    [
        (DDPConfig, {"num_distributed_optimizer_instances": 2}, "leave it at 1"),
        (OptimizerConfig, {"exp_avg_dtype": torch.bfloat16}, "torch.float32"),
        (OptimizerConfig, {"exp_avg_sq_dtype": torch.bfloat16}, "torch.float32"),
        (OptimizerConfig, {"main_params_dtype": torch.bfloat16}, "torch.float32"),
        (OptimizerConfig, {"use_precision_aware_optimizer": True}, "drop it"),
        (OptimizerConfig, {"optimizer_cpu_offload": True}, "drop it"),
    ],
)
def test_what_is_out_of_scope_is_refused_by_name_with_a_remedy(make, settings, remedy):
    [(name, value)] = settings.items()
    with pytest.raises(ConfigError, match=re.escape(name)) as refusal:
        make(**settings)
    assert repr(value) in str(refusal.value) and remedy in str(refusal.value)


def test_a_dead_rank_is_noticed_within_the_timeout_of_the_group():
    """At once where its data is waited for; the rest wait for ranks that have given up."""
    with pytest.raises(AssertionError) as failure:
        expect_failure_on_all(fault_cases.dead, RANKS, CommunicationError, STUCK["reduce"])
    text = str(failure.value)
    ranks = re.findall(r"^--- rank (\d+) ---$", text, re.MULTILINE)
    assert ranks == [str(FAULTY)], f"every other rank names the reduce\n{text}"
    assert "the process died with exit code 17" in text
