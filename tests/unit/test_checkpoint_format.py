"""The reader that the page on the format prints reads our checkpoints, and refuses damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lw.dist_checkpointing.directory import step_directory
from megatron_lw.dist_checkpointing.storage import FileStorage
from tests.checkpoint_files import STEP, tensors_of, write_checkpoint
from tests.unit.doc_blocks import ROOT, blocks


@pytest.fixture(scope="module")
def reader() -> Any:
    [block] = [b for b in blocks(ROOT / "docs" / "checkpoint-format.md") if b.info.startswith("py")]
    assert len(block.text.splitlines()) < 50
    names: dict[str, Any] = {}
    exec(compile(block.text, block.where, "exec"), names)
    return names["read_checkpoint"]


def test_it_reads_every_tensor(reader: Any, tmp_path: Path) -> None:
    directory = write_checkpoint(FileStorage(), tmp_path, seed=3)
    assert directory == step_directory(tmp_path, STEP)
    manifest, tensors = reader(directory)
    expected = {f"{name}/{state}": value for (name, state), value in tensors_of(3).items()}
    assert tensors.keys() == expected.keys() and manifest["step"] == STEP
    for key, value in expected.items():
        found = torch.from_numpy(tensors[key])
        assert tuple(found.shape) == tuple(value.shape)
        assert torch.equal(found.view(value.dtype), value), key


def test_it_refuses_what_is_damaged(reader: Any, tmp_path: Path) -> None:
    directory = write_checkpoint(FileStorage(), tmp_path)
    for path in sorted(directory.iterdir()):
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            reader(directory)
        path.write_bytes(whole)
    reader(directory)
