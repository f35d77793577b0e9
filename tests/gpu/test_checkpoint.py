"""What lies on a device goes to a file by way of host buffers, and comes to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_lw.dist_checkpointing.data_file import Blob, write_data_file
from megatron_lw.dist_checkpointing.manifest import CHUNK_NBYTES
from megatron_lw.dist_checkpointing.storage import FileStorage


@pytest.mark.gpu
def test_device_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    """Over many chunks, with tensors in host memory between; one is still being computed."""
    names: list[str] = []
    for device in ("cpu", "cuda"):
        chance = torch.Generator().manual_seed(0)
        blobs = []
        for index, numel in enumerate((3, CHUNK_NBYTES, 1, 2 * CHUNK_NBYTES + 5)):
            tensor = torch.randn(numel, generator=chance).to("cpu" if index == 2 else device)
            blobs.append(Blob(key=str(index), start=(0,), tensor=tensor * 2))
        written = write_data_file(FileStorage(), tmp_path, 0, blobs)
        assert written is not None
        names.append(written.record.name)
    assert names[0] == names[1]
