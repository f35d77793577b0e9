"""What the example script shows, writes and accepts, and its schedule: no process group needed."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from tests.unit.example_modules import example

report = example("report")
script = example("pretrain_gpt")
settings = example("settings")


def test_clock_parts_leave_the_sum_alone() -> None:
    clock = report.Clock()
    clock.add("optimizer", 3.0)
    clock.split("optimizer", {"reduce": 1.0, "clip": 0.5})
    assert clock.seconds == {"optimizer: reduce": 1.0, "optimizer: clip": 0.5, "optimizer": 1.5}


def records() -> list[object]:
    return [
        report.StepRecord(
            step=step,
            loss=5.5 / step,
            grad_norm=1.0,
            lr=0.1,
            tokens_per_second=1e4,
            held_out=3.25 if step == 4 else None,
        )
        for step in range(1, 5)
    ]


def test_files_hold_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write_csv(tmp_path / "loss.csv", records())
    with (tmp_path / "loss.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in lines] == [5.5 / step for step in range(1, 5)]
    assert [line["held_out"] for line in lines] == ["", "", "", "3.25"]
    assert report.write_curve(tmp_path / "loss.png", records(), 3.0)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not report.write_curve(tmp_path / "other.png", records(), 3.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_without_a_terminal_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], enabled: bool
) -> None:
    with report.Reporter(4, enabled=enabled, log_every=3) as reporter:
        for record in records():
            reporter.step(record)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("  ")[:2] for line in lines]
    expected = [["step 1/4", "loss 5.500"], ["step 3/4", "loss 1.833"]]
    expected += [["step 4/4", "loss 1.375"], ["step 4/4", "held-out loss 3.2500"]]
    assert shown == (expected if enabled else [])
    assert reporter.records == records()


def test_learning_rate_rises_then_falls() -> None:
    shares = [script.learning_rate_share(step, 100, 0.1) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9] == shares[10] == 1.0
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert 0 < shares[-1] < 0.001
    groups = [
        {"min_lr": 0.1, "max_lr": 0.3, "lr_mult": 1.0},
        {"min_lr": 0.0, "max_lr": 0.1, "lr_mult": 0.5},
    ]
    assert script.set_learning_rate(groups, 0.5) == pytest.approx(0.2)
    assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.025])


def test_only_the_default_text_and_steps_have_a_target() -> None:
    targets = []
    for line in ("", "--steps 3", "--data a.txt", "--steps 3 --target 0.9"):
        args = settings.make_parser().parse_args(line.split())
        settings.check_arguments(args)
        targets.append(args.target)
    assert targets == [0.85, None, None, 0.9]


@pytest.mark.parametrize(
    "line", ["--steps 0", "--eval-every -1", "--seed -1", "--warmup 1.5", "--eval-windows 0"]
)
def test_numbers_out_of_range_are_named(line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}: must be "):
        settings.check_arguments(settings.make_parser().parse_args(line.split()))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_errors_are_one_line_from_one_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stop:
        settings.make_parser().parse_args(["--steps", "many"])
    message = "pretrain_gpt.py: error: argument --steps: invalid int value: 'many'\n"
    assert stop.value.code == (2 if rank == "0" else 0)
    assert capsys.readouterr().err == (message if rank == "0" else "")


def test_what_is_wrong_in_one_process_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "taken").write_text("a file, not a folder")
    for line, message in (
        (f"--data {tmp_path / 'absent'}", f"--data {tmp_path / 'absent'}: No such file"),
        (f"--out {tmp_path / 'taken'}", "File exists"),
        ("--global-batch 7", "--global-batch 7 must be a multiple of --micro-batches 2"),
        ("--heads 3", "must be a multiple of 2 x heads"),
        ("--seed -1", "--seed -1: must be"),
    ):
        with pytest.raises(SystemExit) as stop:
            script.main(["--out", str(tmp_path / "out"), *line.split()])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("pretrain_gpt.py: error: ")
        assert error.count("\n") == 1
        assert message in error


def test_a_short_run_learns_repeats_itself_and_is_held_to_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bitwise: two runs of one seed. The text repeats, so that a tiny model can learn it."""
    monkeypatch.delenv("RANK", raising=False)
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be that is the question " * 200)
    sizes = "--steps 30 --layers 1 --width 32 --heads 2 --sequence 32 --global-batch 8"
    losses = []
    for target, status in (("0.85", 0), ("0.0001", 1)):
        out = tmp_path / target
        line = f"--data {text} {sizes} --dtype bf16 --eval-every 10 --out {out} --target {target}"
        assert script.main(line.split()) == status
        assert ("FAILED: " in capsys.readouterr().out) == bool(status)
        with (out / "loss.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        assert [row["step"] for row in lines if row["held_out"]] == ["10", "20", "30"]
        losses.append([(row["loss"], row["grad_norm"], row["held_out"]) for row in lines])
    assert losses[0] == losses[1]


def test_every_fp8_format_learns_as_bf16_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class *numerical*: the final held-out loss is within 1 % of that of BF16 weights."""
    monkeypatch.delenv("RANK", raising=False)
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be that is the question " * 200)
    sizes = "--steps 30 --layers 1 --width 32 --heads 2 --sequence 32 --global-batch 8"
    losses = []
    for fp8 in ("", *(f"--fp8 {name}" for name in settings.FP8)):
        out = tmp_path / (fp8 or "bf16")
        line = f"--data {text} {sizes} --dtype bf16 --eval-every 30 {fp8} --out".split()
        assert script.main([*line, str(out)]) == 0
        with (out / "loss.csv").open(encoding="utf-8", newline="") as file:
            losses.append(float(list(csv.DictReader(file))[-1]["held_out"]))
    assert all(abs(loss / losses[0] - 1) < 0.01 for loss in losses[1:]), losses
    assert len(set(losses)) > 3
