"""Checkpoints of models whose names, copies, chunks or children differ between save and load."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed import checkpoint_model_cases as cases
from tests.harness import run_ranks


@pytest.mark.parametrize("saved, loaded", [(True, True), (True, False), (False, True)])
def test_weights_that_were_tied_or_are_now(tmp_path, saved, loaded):
    """Bitwise; two weights that were not tied cannot silently become one on each stage."""
    run_ranks(cases.save_tied, 2, tmp_path, saved)
    for text, bad in run_ranks(cases.load_tied, 2, tmp_path, loaded):
        if saved:
            assert (text, bad) == ("", [])
        else:
            assert "the checkpoint has 'output/exp_avg', 'output/exp_avg_sq'" in text
    if not saved:
        for found in run_ranks(cases.load_tied, 2, tmp_path, True, ("output",)):
            assert found == ("", [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_stage_and_two_share_tied_weights(tmp_path, ranks):
    """Bitwise: tied on two stages -> one parameter used twice -> tied again."""
    run_ranks(cases.save_tied, 2, tmp_path / "two", True)
    for found in run_ranks(cases.load_on_one, ranks, tmp_path / "two"):
        assert found == ("", [])
    run_ranks(cases.save_untied_on_one, ranks, tmp_path / "one")
    for found in run_ranks(cases.load_tied, 2, tmp_path / "one", True):
        assert found == ("", [])


@pytest.mark.parametrize("saved, loaded", [((2, 2), (1, 1)), ((1, 2), (2, 1)), ((2, 1), (2, 2))])
def test_virtual_chunks_are_told_apart_by_global_names(tmp_path, saved, loaded):
    """Bitwise; buffers of one name are filled in every chunk."""
    run_ranks(cases.save_chunks, 2, tmp_path, *saved)
    reports = run_ranks(cases.load_chunks, 2, tmp_path, *loaded)
    assert sum(count for _, count, _ in reports) >= 2 * len(cases.LAYERS)
    for bad, _, calls in reports:
        assert bad == []
        assert calls == [[5, 5, 5]] * loaded[1]


def test_buffers_of_one_name_must_be_equal_in_all_chunks(tmp_path):
    for text in run_ranks(cases.chunks_that_differ, 2, tmp_path):
        assert "calls/value is in two chunks of one rank, with different contents" in text


@pytest.mark.parametrize("saved, now", [((), ("a",)), (("a", "b"), ()), (("a",), ("b",))])
def test_frozen_then_trained_and_the_reverse(tmp_path, saved, now):
    """Weights are taken over; states that one side lacks must be left out by name."""
    for strict, text, bad in run_ranks(cases.freeze, 2, tmp_path, saved, now):
        name = sorted(set(saved) - set(now) or set(now) - set(saved))[0]
        assert re.search(rf"the checkpoint has (no )?'{name}/exp_avg'", strict)
        assert text == "" and bad == []


def test_a_frozen_weight_is_its_master_and_the_reverse(tmp_path):
    shift = len("master") / 64
    for frozen, trained in run_ranks(cases.masterless, 2, tmp_path):
        assert frozen == {"a": 19 + shift, "b": 1006 + shift, "c": 2005 + shift}
        assert trained == {"a": 19, "b": 1006 + shift, "c": 2005 + shift}


def test_a_stage_with_nothing_to_train(tmp_path):
    first, second = run_ranks(cases.frozen_stage, 2, tmp_path)
    assert first == ([], 0, True)
    assert second[0] == [] and second[1] > 0 and second[2]


def test_more_ranks_than_elements(tmp_path):
    for ranks in (3, 1, 2):
        found = run_ranks(cases.empty_ranks, ranks, tmp_path)
        assert all(bad == [] for bad, _ in found)
        assert sum(count for _, count in found) >= 3


@pytest.mark.parametrize("saved, loaded", [(2, 2), (1, 3), (3, 2)])
def test_every_child_goes_on_where_it_was(tmp_path, saved, loaded):
    """States at owners too: bitwise, as all ranks have the same integer gradients."""
    before = run_ranks(cases.every_child, saved, tmp_path, False)
    after = run_ranks(cases.every_child, loaded, tmp_path, True)
    for child in cases.CHILDREN:
        boxes = [{}, {}]
        for number, found in enumerate((before, after)):
            for rank in found:
                boxes[number].update(rank[child][1])
        assert boxes[0].keys() == boxes[1].keys(), child
        assert child in ("adam", "lion", "sgd", "muon", "SGD") or boxes[0]
        for key, box in boxes[0].items():
            assert torch.equal(box, boxes[1][key]), (child, key)
        for weights, _, steps in (rank[child] for rank in after):
            assert set(steps.values()) == {2}
            for name, weight in weights.items():
                expected = before[0][child][0][name]
                assert torch.isfinite(expected).all(), (child, name)
                if child.endswith("muon") and weight.dim() > 1:
                    torch.testing.assert_close(weight, expected)
                else:
                    assert torch.equal(weight, expected), (child, name)
