"""Stop and resume, what wins at resume, what is refused, saves beside training."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed import resume_cases as cases
from tests.distributed.cases import relative
from tests.harness import run_ranks


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, ranks):
    """Bitwise, in the same layout: results, weights and masters, from garbage weights."""
    straight = run_ranks(cases.uninterrupted, ranks, tmp_path)
    again = run_ranks(cases.resumed, ranks, tmp_path, {})
    for (_, results, weights, masters), (_, now, weights_now, masters_now) in zip(
        straight, again, strict=True
    ):
        assert results == now and all(r[0] for r in results)
        assert results[0][1] > 1.0  # the clip is at work
        assert equal(weights, weights_now)
        assert equal(masters, masters_now)


@pytest.mark.parametrize("ranks, sizes", [(1, {}), (3, {}), (4, {})])
def test_a_run_resumed_on_other_ranks_goes_on_alike(tmp_path, ranks, sizes):
    """Weights after the load bitwise; the run afterwards in the numerical class (bf16)."""
    straight = run_ranks(cases.uninterrupted, 2, tmp_path)[0]
    for loaded, results, weights, _ in run_ranks(cases.resumed, ranks, tmp_path, sizes):
        assert not any(w.isnan().any() for w in loaded.values())
        for one, other in zip(straight[1], results, strict=True):
            assert other[1] == pytest.approx(one[1], rel=5e-3)
        for name, weight in weights.items():
            assert relative(weight, straight[2][name]) < 5e-3


def test_saved_settings_win_unless_the_caller_says_otherwise(tmp_path):
    for found in run_ranks(cases.settings_at_resume, 2, tmp_path):
        lr = 0.02 * 0.9
        assert found["saved"] == (pytest.approx(lr), 0.1, 0.95)
        assert found["current"] == (0.5, 0.0, 0.5)
        assert found["lr kept"] == (0.5, 0.1, 0.95)
        steps, equal_weights = found["weights only"]
        assert equal_weights and set(steps) == {0}


def test_what_does_not_fit_is_refused_by_name_before_anything_changes(tmp_path):
    expected = {
        "missing": r"CheckpointError: \[rank \d\] the checkpoint has no 'z_norm/master'",
        "unknown": r"CheckpointError: \[rank \d\] the checkpoint has 'e_weight/master'",
        "shape": r"CheckpointError: \[rank \d\] c_norm/master has the logical shape \[48\]",
        "left out": r"^$",
        "nowhere": r"CheckpointError: \[rank \d\] .*x",
        "other model": r"ConfigError: \[rank \d\] model has 1 chunks",
        "step": r"ConfigError: \[rank \d\] keep_last=0",
        "value": r"CheckpointError: \[rank \d\] extra\['f'\]\[0\].*",
    }
    for found in run_ranks(cases.refusals, 2, tmp_path):
        assert found.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, found[name]), (name, found[name])


def test_states_of_another_child_are_dropped_by_name_and_said_aloud(tmp_path):
    first, *others = run_ranks(cases.changed_child, 2, tmp_path)
    messages, zero = first
    assert any("a_weight/momentum" in m and "dropped" in m for m in messages)
    assert all(not texts for texts, _ in others)
    assert any(zero.values()) and not all(zero.values())


def test_an_optimizer_that_takes_a_parameter_over_starts_as_it_always_does(tmp_path):
    found = run_ranks(cases.changed_to_whole, 2, tmp_path)
    assert {value for sums, _ in found for value in sums} == {0.5}
    assert all(moved for _, moved in found)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(tmp_path, background):
    for text, later, again in run_ranks(cases.failing_save, 2, tmp_path, background):
        failed = later if background else text
        assert "[rank 1]" in failed and "No space left" in failed
        assert (text if background else later) == ""
        assert again == ""


def test_a_save_beside_training_holds_what_was_at_its_call(tmp_path):
    for found in run_ranks(cases.background, 2, tmp_path):
        assert found["done"] and found["moved"]
        assert found["as at the call"]
        assert found["names"] == ["step-0000000003"]


def test_copies_that_differ_are_found_at_save(tmp_path):
    for text in run_ranks(cases.different_copies, 2, tmp_path):
        assert re.search(r"norm/master at \[0\] differs over group 'tp': .*rank 0.*rank 1", text)
    assert not list(tmp_path.glob("*/manifest.json"))
