"""All that needs a GPU, in one go: the tests in tests/gpu and the benchmarks on the device.

    make gpu-check
    python benchmarks/gpu_check.py [--seconds 480] [--json FILE]

For a machine with one NVIDIA GPU and torch 2.11 or later; nothing is installed. Each part runs in a
process of its own with what is left of the time, so that one that hangs or fails takes none of the
others along. Prints one table, and ends with status 1 if a part did not pass, with 2 without a GPU.
How to read the table: docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
LEAST_TORCH = (2, 11)
SECONDS = 480
"""Of all parts together; a lent machine has twice that for everything."""
SHARE = 0.6
"""Of the time that is left, what one part may take at most."""
KEPT_LINES = 25

Rows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the check.

    Attributes:
        name: in the table.
        arguments: of Python; `{json}` stands for the file that the part writes its numbers to.
        read: from those numbers to rows of the table; None: it writes none.
        needs: modules without which it cannot run.
    """

    name: str
    arguments: tuple[str, ...]
    read: Callable[[Any], Rows] | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part.

    Attributes:
        part: which.
        status: "passed", or what went wrong.
        seconds: that it took.
        rows: of the table.
        output: the end of what it printed, where it did not pass.
    """

    part: Part
    status: str
    seconds: float
    rows: Rows
    output: str = ""


def read_steps(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Rows:
    """Our step against torch.optim.Muon's."""
    return [
        (
            f"step of {case}",
            f"ours {row['ours']:.2f} ms, torch {row['torch']:.2f} ms, torch / ours "
            f"{row['ratio']:.2f}, weights differ by {row['differ']:.1e}",
        )
        for cases in found.values()
        for case, row in cases.items()
    ]


def read_fp8(found: Mapping[str, Mapping[str, float]]) -> Rows:
    """Quantising in one call against one by one; layers against a BF16 one."""
    rows = []
    for name, row in found.items():
        if "ms" in row:
            text = f"{row['ms']:.3f} ms, bf16 / this {row['ratio']:.2f}"
        else:
            text = (
                f"one call {row['one call']:.4f} ns, one by one {row['copy_ each']:.4f} ns, "
                f"ratio {row['ratio']:.1f}; large {row['large']:.4f} ns an element"
            )
        rows.append((name if "ms" in row else f"quantise, {name}", text))
    return rows


def read_checkpoint(found: Mapping[str, Any]) -> Rows:
    """How long a save beside training stalls."""
    seconds = found["seconds"]
    return [
        (
            f"save of {found['nbytes'] / 1e9:.2f} GB",
            f"plain {seconds['plain']:.3f} s, ours {seconds['ours']:.3f} s; in the background it "
            f"stalls {seconds['stall']:.3f} s, of a save {found['stall']:.3f}",
        )
    ]


PARTS = (
    Part(
        name="tests/gpu",
        arguments=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-ra", "tests/gpu"),
        needs=("pytest", "hypothesis"),
    ),
    Part(
        name="benchmarks/muon.py",
        arguments=("benchmarks/muon.py", "--device", "cuda", "--json", "{json}"),
        read=read_steps,
    ),
    Part(
        name="benchmarks/fp8.py",
        arguments=("benchmarks/fp8.py", "--device", "cuda", "--json", "{json}"),
        read=read_fp8,
    ),
    Part(
        name="benchmarks/checkpoint.py",
        arguments=("benchmarks/checkpoint.py", "--quick", "--device", "cuda", "--json", "{json}"),
        read=read_checkpoint,
    ),
)


def refusal() -> str | None:
    """Why this machine is not one for the check; None if it is."""
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    if version < LEAST_TORCH:
        least = ".".join(str(number) for number in LEAST_TORCH)
        return f"torch {torch.__version__} is too old: install {least} or later"
    if not torch.cuda.is_available():
        return (
            "torch sees no CUDA device; without one, `make test` and `make bench` are all there is"
        )
    return None


def run(part: Part, seconds: float, folder: Path) -> Outcome:
    """Run a part in a process of its own, for so many seconds at most."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        text = f"NOT RUN: without {', '.join(missing)}"
        return Outcome(part=part, status=text, seconds=0.0, rows=[])
    file = folder / "numbers.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, *(file.as_posix() if a == "{json}" else a for a in part.arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own processes too: they hold the pipe open
        output, _ = process.communicate()
        status = f"stopped after {seconds:.0f} s"
    spent = time.perf_counter() - start
    if status != "ended with 0":
        lines = output.decode(errors="replace").splitlines()[-KEPT_LINES:]
        return Outcome(part=part, status=status, seconds=spent, rows=[], output="\n".join(lines))
    return _passed(part, spent, file, output.decode(errors="replace"))


def _passed(part: Part, spent: float, file: Path, output: str) -> Outcome:
    """A part that ended well; one that has run nothing at all has not passed."""
    last = output.strip().splitlines()[-1:] or [""]
    if part.read is not None:
        try:
            rows = part.read(json.loads(file.read_text()))
        except (OSError, ValueError, LookupError) as error:
            text = f"its numbers cannot be read: {type(error).__name__}: {error}"
            return Outcome(part=part, status=text, seconds=spent, rows=[], output=output)
    else:
        rows = [(part.name, last[0].strip("= "))]
        if " passed" not in last[0]:
            return Outcome(
                part=part, status="NOTHING RAN", seconds=spent, rows=rows, output=last[0]
            )
    return Outcome(part=part, status="passed", seconds=spent, rows=rows)


def table(outcomes: Sequence[Outcome], device: str) -> str:
    """All rows, then what each part took and what became of it."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    took = [(each.part.name, f"{each.status}, {each.seconds:.0f} s") for each in outcomes]
    wide = max(len(name) for name, _ in [*rows, *took]) + 2
    lines = [device, "", *(f"{name:{wide}}{text}" for name, text in [*rows, *took])]
    for each in outcomes:
        if each.output:
            lines += ["", f"--- {each.part.name}: {each.status} ---", each.output]
    return "\n".join(lines)


def check(parts: Sequence[Part], seconds: float) -> list[Outcome]:
    """Run all parts within so many seconds."""
    end = time.perf_counter() + seconds
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts):
            left = end - time.perf_counter()
            share = left if number + 1 == len(parts) else SHARE * left
            outcomes.append(run(part, max(share, 1.0), Path(folder)))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this machine; the status of the process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--json", type=Path, help="write rows and statuses to this file")
    options = parser.parse_args(arguments)
    if (why := refusal()) is not None:
        print(f"gpu-check: {why}", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    device = f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    outcomes = check(PARTS, options.seconds)
    print(table(outcomes, device))
    if options.json:
        found = {
            "device": device,
            "parts": {each.part.name: [each.status, each.seconds] for each in outcomes},
            "rows": dict(row for each in outcomes for row in each.rows),
        }
        options.json.write_text(json.dumps(found, indent=2))
    return int(any(each.status != "passed" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
