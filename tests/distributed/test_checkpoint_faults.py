"""Checkpoints at awkward moments and after failures: every rank hears of it, nothing is lost."""

from __future__ import annotations

import re

import pytest

from tests.distributed import checkpoint_fault_cases as cases
from tests.harness import run_ranks


def test_damage_that_one_rank_reads_breaks_all_until_a_good_load(tmp_path):
    for found in run_ranks(cases.damaged, 2, tmp_path):
        assert re.search(r"CheckpointError: \[rank 1\] .*rank00001-.*chunk 0", found["load"])
        for what in ("step", "save", "publish"):
            assert "StateError" in found[what] and "loading" in found[what], found
        assert found["same"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_load_repairs_what_a_failed_step_broke(tmp_path, ranks):
    """Bitwise: it goes on as if nothing had been; a load that finds nothing repairs nothing."""
    for found in run_ranks(cases.broken_by_a_step, ranks, tmp_path):
        assert "half-way: [rank 1]" in found["step"]
        assert "StateError" in found["save"] and "StateError" in found["again"]
        assert "no checkpoint there" in found["no such"]
        assert found["same"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_saves_and_loads_at_any_moment(tmp_path, ranks):
    """Bitwise, with gathers and gradients under way."""
    for found in run_ranks(cases.moments, ranks, tmp_path):
        assert found == dict.fromkeys(found, True)


def test_loss_scale_and_its_counts_travel(tmp_path):
    for found in run_ranks(cases.loss_scale, 2, tmp_path):
        saved, loaded = found["states"]
        assert saved == loaded and saved["scale"] != 2.0**10
        assert found["skips"] == 2
        assert "the checkpoint's kind is 'dynamic'" in found["other kind"]
        assert found["left out"] == 2.0**10


def test_ranks_that_see_other_directories_are_told(tmp_path):
    for found in run_ranks(cases.disks, 2, tmp_path):
        assert re.search(r"CheckpointError: \[rank 1\] .*No such file", found["save"])
        assert re.search(r"different checkpoints there: step 1 .*rank 0; step 2", found["steps"])
        assert "different checkpoints there: step 1 with" in found["contents"]
    assert not list(tmp_path.glob("disk*/run/*/manifest.json"))


def test_what_is_wrong_on_one_rank_is_raised_on_all(tmp_path):
    expected = {
        "keep_last": r"ConfigError: \[rank 1\] keep_last=0",
        "step": r"ConfigError: \[rank 1\] step=-1",
        "other step": r"CheckpointError: \[rank",
        "value": r"CheckpointError: \[rank 1\] extra\['x'\]",
        "leave_out": r"ConfigError: \[rank 1\] leave_out='a'",
        "keep": r"ConfigError: \[rank 1\] keep_settings has 'x'",
        "scheduler": r"CheckpointError: \[rank 1\] the checkpoint has no scheduler",
        "fine": "^$",
    }
    for found in run_ranks(cases.on_one_rank, 2, tmp_path):
        assert found.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, found[name]), (name, found[name])


def test_a_warning_that_is_an_error_is_one_on_all_ranks_and_changes_nothing(tmp_path):
    run_ranks(cases.save_own_extra, 3, tmp_path)
    for rank, found in enumerate(run_ranks(cases.warnings_as_errors, 2, tmp_path)):
        text, kept, told, values = found
        assert "[rank 0] CheckpointWarning: 3 ranks saved values of their own" in text
        assert kept
        assert len(told) == (rank == 0)
        assert values == {"extra": {"same": 1}, "own": [0, 1, 2]}


def test_a_save_in_the_background_is_of_its_call(tmp_path):
    for found in run_ranks(cases.mutated_meanwhile, 2, tmp_path):
        assert found == {
            "unchanged": True,
            "same": True,
            "extra": True,
            "buffer": [0, 1, 2, 3],
            "lr": 0.1,
        }


def test_load_waits_for_a_save_in_the_background(tmp_path):
    assert run_ranks(cases.load_waits_for_the_save, 2, tmp_path) == [2, 2]


def test_buffers_that_differ_are_named_and_may_be_left_out(tmp_path):
    for rank, (text, missing, kept) in enumerate(run_ranks(cases.different_buffers, 2, tmp_path)):
        assert re.search(r"running_mean/value at \[0\] differs .*rank 0.*rank 1", text)
        assert "leave_out=" in text
        assert "the checkpoint has no 'running_mean/value'" in missing
        assert kept == [rank] * 3


def test_a_scheduler_that_refuses_its_state_on_one_rank(tmp_path):
    for found in run_ranks(cases.disturbed_scheduler, 2, tmp_path):
        assert "[rank 1] ValueError: not mine" in found["load"]
        assert "StateError" in found["step"]
        assert found["goes on"]
