"""DTensors on two and three ranks, through `torch.distributed.checkpoint`; all bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, load

from megatron_lw.dist_checkpointing.torch_reader import TorchReader
from megatron_lw.dist_checkpointing.verify import verify
from tests.distributed import checkpoint_cases, torch_storage_cases
from tests.harness import expect_failure_on_all, run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two and four ranks saved; value = global element index."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = run_ranks(checkpoint_cases.save_all, 2, root, [{"tensor": 2}])[0]
    layout = {"tensor": 2, "pipeline": 2}
    return [*found, *run_ranks(checkpoint_cases.save_all, 4, root, [layout])[0]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_and_columns_of_dtensors_are_loaded(saved: list[str], ranks: int) -> None:
    for found in run_ranks(torch_storage_cases.load_dtensors, ranks, saved):
        assert found == ["34 equal"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_plain_model_on_one_process_is_loaded(saved: list[str]) -> None:
    for path in saved:
        model = {
            name: torch.full(spec.shape, -1.0) for name, spec in checkpoint_cases.LOGICAL.items()
        }
        load({"model": model}, storage_reader=TorchReader(path))
        for name, tensor in model.items():
            assert torch.equal(tensor, checkpoint_cases.truth(name))


@pytest.mark.parametrize("ranks", [1, 3])
def test_dtensors_are_written_in_our_format(tmp_path: Path, ranks: int) -> None:
    """Among them rows that do not divide, and a rank without any."""
    for differing, others in run_ranks(torch_storage_cases.save_and_load_dtensors, ranks, tmp_path):
        assert differing == [0, 0, 0, 0]
        assert others == [3, 0, 1, 2]
    report = verify(tmp_path)
    assert report.is_whole
    assert report.manifest is not None
    pieces = {record.name: len(record.pieces) for record in report.manifest.tensors}
    assert pieces["model.rows"] == ranks and pieces["model.few"] == 1


def test_damage_is_raised_on_all_ranks(saved: list[str], tmp_path: Path) -> None:
    directory = tmp_path / Path(saved[0]).name
    directory.mkdir()
    for path in Path(saved[0]).iterdir():
        content = bytearray(path.read_bytes())
        if path.name.startswith("rank00001"):
            content[-1] ^= 4
        (directory / path.name).write_bytes(content)
    expect_failure_on_all(
        torch_storage_cases.load_damaged, 2, CheckpointException, "is damaged", str(directory)
    )
