"""Export: whole weights in plain safetensors files, from masters, with little memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_lw.dist_checkpointing import export as package_export
from megatron_lw.dist_checkpointing.export import export
from megatron_lw.dist_checkpointing.reader import CheckpointReader, blocks
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box
from tests import small_checkpoint as small


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return small.save_small(tmp_path / "run")


def check_weights(found: dict[str, torch.Tensor]) -> None:
    """Bitwise: bf16(master), the logical rows only; what is not stepped as it was."""
    assert set(found) == {*small.SHAPES, "frozen", "calls"}
    for name in small.SHAPES:
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], small.master(name).to(torch.bfloat16))
        assert not torch.equal(found[name].float(), small.master(name))
    assert torch.equal(found["frozen"], small.FROZEN)
    assert torch.equal(found["calls"], small.CALLS)


def test_one_file_holds_the_weights_in_their_own_dtype(saved: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    done = export(saved, tmp_path / "out", progress=lambda *at: told.append(at))
    [file] = done.files
    check_weights(load_file(file))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert done.num_weights == 6
    assert told[-1] == (done.nbytes, done.nbytes) and len(told) == 6
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_tied_weight_is_written_once(saved: Path, tmp_path: Path) -> None:
    small.add_copy(saved, "output.weight")
    done = export(saved, tmp_path / "out")
    check_weights(load_file(done.files[0]))
    assert done.aliases == {"output.weight": "words.weight"}
    with safe_open(done.files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt", **done.aliases}


def test_two_weights_of_one_name_are_refused(saved: Path, tmp_path: Path) -> None:
    small.add_copy(saved, "frozen")
    with pytest.raises(CheckpointError, match="'frozen' names 2 weights or buffers"):
        export(saved, tmp_path / "out")


def test_files_are_divided_with_an_index_and_hold_the_same(saved: Path, tmp_path: Path) -> None:
    done = export(saved.parent, tmp_path / "out", max_shard_nbytes=130)
    assert len(done.files) > 2
    content = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in done.files:
        part = load_file(file)
        assert all(content["weight_map"][name] == file.name for name in part)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 130
        found |= part
    check_weights(found)
    assert content["metadata"] == {"total_size": sum(t.nbytes for t in found.values())}


def test_no_more_than_a_block_is_in_memory(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = CheckpointReader.read

    def counted(self: CheckpointReader, record: object, box: Box, out: torch.Tensor) -> None:
        read.append(out.nbytes)
        plain(self, record, box, out)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointReader, "read", counted)
    monkeypatch.setattr(package_export, "BLOCK_NBYTES", 16)
    [file] = export(saved, tmp_path / "out").files
    check_weights(load_file(file))
    assert max(read) <= 16 and len(read) > 20


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (4, 0, 2), (2, 3, 5)])
@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_blocks_follow_each_other(shape: tuple[int, ...], most: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [
        whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
        for box in blocks(shape, most)
    ]
    assert all(part.numel() <= most for part in parts)
    assert torch.cat([part.reshape(-1) for part in parts]).tolist() == whole.view(-1).tolist()


def test_a_target_that_holds_an_export_is_left_alone(saved: Path, tmp_path: Path) -> None:
    export(saved, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds 'model.safetensors' already"):
        export(saved, tmp_path / "out")
    with pytest.raises(CheckpointError, match="max_shard_nbytes = 0"):
        export(saved, tmp_path / "other", max_shard_nbytes=0)


def test_a_damaged_source_gives_no_file(saved: Path, tmp_path: Path) -> None:
    [data] = saved.glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
