"""`megatron-lw inspect`, `verify`, `export` and `reshard`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_lw.cli.main import main
from megatron_lw.cli.progress import progress_bar
from megatron_lw.cli.sizes import human_size, parse_size
from megatron_lw.dist_checkpointing.directory import read_manifest
from tests import small_checkpoint as small


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return small.save_small(tmp_path / "run")


def test_inspect_shows_tensors_sizes_topology_and_settings(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved.parent)]) == 0
    shown = capsys.readouterr().out
    assert f"step {small.STEP}: " in shown
    padding = sum(b - a for row in read_manifest(saved).rows for a, b in row.padding)
    for line in (
        "parameters 4, tensors 12, data files 1, 2.281 KiB",
        "ranks: world 1, dp 1, tp 1, pp 1, ep 1, expert_tp 1, expert_dp 1",
        f"elements, of which {padding} padding",
        "| layers.0.w/master     | bfloat16 | float32  | 8x6   | 192 B | 1      |",
        "| muon  | 12    | momentum            |",
        "| muon/dense             | clip_grad true, ",
        'extra = {"samples": 96}',
    ):
        assert line in shown


def test_inspect_as_json_holds_the_manifest(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    manifest = read_manifest(saved)
    assert (content["step"], content["topology"]["world"]) == (small.STEP, 1)
    assert content["nbytes"] == sum(file.nbytes for file in manifest.files)
    keys = [f"{tensor['name']}/{tensor['state']}" for tensor in content["tensors"]]
    assert keys == [record.key for record in manifest.tensors]
    [words] = [
        t for t in content["tensors"] if t["name"] == "tied/words" and t["state"] == "master"
    ]
    assert words["shape"] == [10, 6] and words["nbytes"] == 240
    assert words["names"] == ["words.weight"] and words["weight_dtype"] == "bfloat16"
    assert content["children"]["adam"]["num_steps"] == small.STEP
    assert content["groups"]["muon/dense"]["lr"] == 0.25
    padding = sum(b - a for row in manifest.rows for a, b in row.padding)
    assert content["rows"]["padding"] == padding > 0


def test_verify_tells_whole_damaged_and_none_apart(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(saved.parent)]) == 0
    assert "whole" in capsys.readouterr().out
    [data] = saved.glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert main(["verify", str(saved)]) == 1
    shown = capsys.readouterr().out
    assert f"{data}: chunk 0" in shown
    assert "it holds calls/value, " in shown
    assert shown.endswith("1 problem\n")
    assert main(["verify", str(tmp_path / "nothing")]) == 2
    assert "no checkpoint there" in capsys.readouterr().err


def test_verify_mentions_what_a_crash_has_left(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / "rank00000-0123456789abcdef.tmp").touch()
    assert main(["verify", str(saved)]) == 0
    assert "left over from a save that did not end" in capsys.readouterr().err


def test_export_writes_the_weights(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(saved), str(out), "--max-shard-size", "200B"]) == 0
    found = {name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert found == {*small.SHAPES, "frozen", "calls"}
    assert capsys.readouterr().out.startswith(f"{out}: 6 weights, 298 B in 2 files")


def test_reshard_writes_a_checkpoint_that_verifies(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dp", "2", "--pp", "2", "--bucket-size", "50", "--max-memory", "96MiB"]
    assert main(["reshard", str(saved), str(tmp_path / "out"), *arguments]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    manifest = read_manifest(tmp_path / "out" / saved.name)
    assert manifest.topology["pp"] == 2 and manifest.topology["world"] == 4
    assert "4 ranks" in capsys.readouterr().out
    (tmp_path / "file").touch()
    for command in ("reshard", "export"):
        assert main([command, str(saved), str(tmp_path / "file" / "below")]) == 2
        assert "cannot be made" in capsys.readouterr().err
    assert main(["reshard", str(saved), str(saved.parent)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_progress_is_silent_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar("reading") as progress:
        assert progress is None
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("reading") as progress:
        assert progress is not None
        progress(1, 2)
    out, err = capsys.readouterr()
    assert not out and "reading" in err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1536), (" 2 tib ", 2 << 40)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "0", "1e3", "5 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


def test_sizes_are_shown_with_a_unit() -> None:
    assert [human_size(n) for n in (0, 1023, 1024, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "5 GiB",
        "3072 TiB",
    ]
