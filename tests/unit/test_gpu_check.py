"""What of `make gpu-check` needs no GPU: when it refuses, how it runs parts, what it prints."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.doc_blocks import ROOT


def load() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks/gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gpu_check = load()


def part(code: str, **settings: object) -> object:
    return gpu_check.Part(name="one", arguments=("-c", code, "{json}"), **settings)


def test_without_a_gpu_it_says_so_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--seconds", "1"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2.10.1+cu128", True), ("2.11.0+cu130", False), ("2.9", True), ("3.0.0a0", False)],
)
def test_an_old_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    why = gpu_check.refusal()
    assert (why is not None) is refused
    assert why is None or (version in why and "2.11" in why)


def test_unknown_arguments_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--fast"])
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('3 passed in 1 s')", "passed"),
        ("print('3 skipped in 1 s')", "NOTHING RAN"),
        ("print('why'); raise SystemExit(3)", "ended with 3"),
    ],
)
def test_a_part_passes_only_if_it_ran_something(tmp_path: Path, code: str, status: str) -> None:
    found = gpu_check.run(part(code), 60.0, tmp_path)
    assert found.status == status
    assert (found.output == "") is (status == "passed")
    assert "why" in found.output or "raise" not in code


def test_numbers_that_are_missing_end_their_part_alone(tmp_path: Path) -> None:
    found = gpu_check.run(part("print('done')", read=gpu_check.read_fp8), 60.0, tmp_path)
    assert "FileNotFoundError" in found.status and found.rows == []
    code = "import sys; open(sys.argv[1], 'w').write('{\"step\": {\"a\": {}}}')"
    found = gpu_check.run(part(code, read=gpu_check.read_steps), 60.0, tmp_path)
    assert "KeyError" in found.status


def test_a_part_that_hangs_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    """A child that outlived its parent would hold the pipe, and the check would wait for it."""
    child = "import signal; signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = gpu_check.run(part(code), 2.0, tmp_path)
    assert found.status == "stopped after 2 s"


def test_a_part_whose_modules_are_missing_is_not_run(tmp_path: Path) -> None:
    found = gpu_check.run(part("raise SystemExit", needs=("no_such_module",)), 60.0, tmp_path)
    assert found.status == "NOT RUN: without no_such_module"


STEPS = {"step": {"a layer": {"ours": 1.0, "torch": 2.0, "ratio": 2.0, "differ": 1e-7}}}
FP8 = {
    "mxfp8": {"one call": 0.5, "copy_ each": 5.0, "ratio": 10.0, "large": 0.25},
    "layer, bf16": {"ms": 2.0, "ratio": 1.0},
}
SAVES = {"nbytes": 2e9, "seconds": {"plain": 1.0, "ours": 1.1, "stall": 0.1}, "stall": 0.09}


def test_numbers_of_every_benchmark_become_rows(tmp_path: Path) -> None:
    outcomes = []
    for numbers, each in zip((None, STEPS, FP8, SAVES), gpu_check.PARTS, strict=True):
        code = f"import sys; open(sys.argv[1], 'w').write({json.dumps(numbers)!r})"
        last = "; print('1 passed')"
        outcomes.append(gpu_check.run(part(code + last, read=each.read), 60.0, tmp_path))
    assert [outcome.status for outcome in outcomes] == ["passed"] * 4
    text = gpu_check.table(outcomes, "a GPU")
    for row in (
        r"one +1 passed",
        r"step of a layer +ours 1.00 ms, torch 2.00 ms, torch / ours 2.00",
        r"quantise, mxfp8 +one call 0.5000 ns, one by one 5.0000 ns, ratio 10.0",
        r"layer, bf16 +2.000 ms",
        r"save of 2.00 GB +plain 1.000 s, ours 1.100 s; .* stalls 0.100 s, of a save 0.090",
    ):
        assert re.search(row, text), text


def test_the_output_of_what_failed_stands_below_the_table(tmp_path: Path) -> None:
    bad = gpu_check.run(part("raise ValueError('of this kind')"), 60.0, tmp_path)
    text = gpu_check.table([bad], "a GPU")
    assert text.index("ended with 1") < text.index("ValueError: of this kind")


def test_all_parts_are_tried() -> None:
    parts = [part("raise SystemExit(1)"), part("print('1 passed')")]
    assert [each.status for each in gpu_check.check(parts, 60.0)] == ["ended with 1", "passed"]


def test_parts_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may take its share of what is left, the last one all of it."""
    given: list[float] = []

    def noted(each: Any, seconds: float, folder: Path) -> Any:
        given.append(seconds)
        return gpu_check.Outcome(part=each, status="passed", seconds=0.0, rows=[])

    monkeypatch.setattr(gpu_check, "run", noted)
    gpu_check.check([part(""), part(""), part("")], 60.0)
    assert given == pytest.approx([36.0, 36.0, 60.0], abs=1.0)


def test_every_script_exists_and_takes_what_it_is_given() -> None:
    for each in gpu_check.PARTS:
        target = next(a for a in each.arguments if a.startswith(("benchmarks/", "tests/")))
        assert (ROOT / target).exists()
        for flag in (a for a in each.arguments if a.startswith("--")):
            assert f'"{flag}"' in (ROOT / target).read_text(), (target, flag)
