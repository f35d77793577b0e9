"""Puts one fault after another into a copy of the repository and runs the test that must find it.

    python -m tests.mutants                # all
    python -m tests.mutants stats reduce   # those whose stage is named

A fault that no test finds, or whose text is no longer in the source, ends the run with status 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("megatron_lw", "tests", "examples", "docs", "README.md", "pyproject.toml")
LIMIT = 300
"""Seconds; a test that a fault makes hang has found it."""


def outcome(fault: Fault, copy: Path) -> str:
    """What became of a fault: "found", or what is wrong."""
    path = copy / "megatron_lw" / fault.file
    source = path.read_text(encoding="utf-8")
    if source.count(fault.old) != 1:
        return f"its text is {source.count(fault.old)} times in {fault.file}"
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *fault.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "found"
    finally:
        path.write_text(source, encoding="utf-8")
    if done.returncode == 1:
        return "found"
    tail = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
    return f"NOT FOUND, pytest ended with {done.returncode}: {' '.join(tail)}"


def main(stages: list[str]) -> int:
    """Run the faults of the stages; all if none is named."""
    console = Console(highlight=False, soft_wrap=True)
    chosen = [fault for fault in FAULTS if not stages or fault.stage in stages]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        for fault in chosen:
            result = outcome(fault, copy)
            missed += result != "found"
            console.print(f"{fault.stage:<12} {fault.what}: {result}", markup=False)
    console.print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
