"""`examples/train_digits.py` as a whole: what it prints, learns and returns on one rank and two."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.unit.example_modules import example

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="scikit-learn, which has the images, is not installed: make setup installs it",
)

TOLERANCE = 1e-5
"""Of losses, in nats, over 12 steps; of gradient norms ten times as much, relatively."""


def run_example(flags: str, folder: Path) -> tuple[int, str]:
    """Run the script on this rank: its exit status, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = example("train_digits").main(f"--dtype fp32 --out {folder} {flags}".split())
    return status, printed.getvalue()


def columns(folder: Path) -> tuple[list[float], list[float]]:
    with (folder / "loss.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["loss"]) for row in rows], [float(row["grad_norm"]) for row in rows]


def test_two_ranks_train_as_one_and_the_convolution_is_muons(tmp_path: Path) -> None:
    """Class *numerical*: fp32, losses and norms of every step."""
    [(status, shown)] = run_ranks(run_example, 1, "--steps 12 --target 0", tmp_path / "one")
    two = run_ranks(run_example, 2, "--steps 12 --target 1.01", tmp_path / "two")
    assert status == 0 and "FAILED" not in shown
    assert [each for each, _ in two] == [1, 0] and "FAILED" in two[0][1], "rank 0 alone judges"
    for text in (shown, two[0][1]):
        [row] = [line.split() for line in text.splitlines() if line.startswith("patches.weight")]
        assert row[1:5] == ["64x1x2x2x2", "float32", "muon", "64x8"]
    assert two[1][1] == "", "rank 0 alone prints"
    (loss, norm), (other_loss, other_norm) = columns(tmp_path / "one"), columns(tmp_path / "two")
    assert other_loss == pytest.approx(loss, rel=0, abs=TOLERANCE)
    assert other_norm == pytest.approx(norm, rel=10 * TOLERANCE, abs=0)
    assert len(loss) == 12 and loss[-1] < loss[0] - 0.8


def test_it_learns_what_it_was_not_shown(tmp_path: Path) -> None:
    """A quarter of the default steps, for a target a little below the default one."""
    [(status, shown)] = run_ranks(run_example, 1, "--steps 50 --target 0.93", tmp_path)
    assert "test accuracy 0.9" in shown and "of 360 images" in shown
    assert status == 0, shown
