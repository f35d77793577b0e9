"""Saving processes are killed for real; `make fuzz` does it ten times as often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROUNDS = 20


def test_killed_saves_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """The process group saves, is killed, loads, compares and saves on, twenty times over."""
    command = [sys.executable, "-W", "error", "-m", "tests.killed_saves", str(tmp_path)]
    done = subprocess.run(
        [*command, "--rounds", str(ROUNDS), "--seed", "0"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    met = json.loads(done.stdout)
    assert met["rounds"] == ROUNDS
    assert met["saves"] >= ROUNDS, "each round ends at least one save"
    assert met["unfinished"] >= 3, "saves were cut off, not only the time between them"
