"""Resharding on one process: what a run in the target layout saves, from what another one saved.

Values are global element indices. `bucket_size` and the multiple of the vocabulary are those of
`checkpoint_cases.Layout`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lw.dist_checkpointing.directory import read_manifest
from megatron_lw.dist_checkpointing.manifest import VALUE, Manifest
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.reshard import reshard
from megatron_lw.dist_checkpointing.verify import verify
from megatron_lw.topology import Topology
from tests.distributed import checkpoint_cases as cases
from tests.distributed import reshard_cases
from tests.harness import run_ranks

LAYOUTS: list[tuple[dict[str, int], Topology]] = [
    ({}, Topology(dp=1, tp=1, ep=1, pp=1, etp=1)),
    ({}, Topology(dp=3, tp=1, ep=1, pp=1, etp=1)),
    ({"tensor": 2}, Topology(dp=2, tp=2, ep=1, pp=1, etp=2)),
    ({"tensor": 4}, Topology(dp=1, tp=4, ep=1, pp=1, etp=4)),
    (
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
        Topology(dp=2, tp=2, ep=2, pp=1, etp=1),
    ),
    ({"pipeline": 2, "tensor": 2}, Topology(dp=1, tp=2, ep=1, pp=2, etp=2)),
    ({"expert": 2, "expert_tensor": 2}, Topology(dp=4, tp=1, ep=2, pp=1, etp=2)),
]
PAIRS = list(product(range(len(LAYOUTS)), repeat=2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One checkpoint a layout."""
    root = tmp_path_factory.mktemp("checkpoints")
    found: dict[int, Path] = {}
    for ranks in (1, 3, 4):
        mine = [i for i, (_, topology) in enumerate(LAYOUTS) if topology.world == ranks]
        paths = run_ranks(cases.save_all, ranks, root, [LAYOUTS[i][0] for i in mine])[0]
        found |= dict(zip(mine, map(Path, paths), strict=True))
    return [found[i] for i in range(len(LAYOUTS))]


def placed(manifest: Manifest) -> dict[str, list[tuple[int, Any]]]:
    """For each stepped tensor which rank holds which box."""
    return {
        record.key: [(manifest.files[p.file].rank, p.box) for p in record.pieces]
        for record in manifest.tensors
        if record.state != VALUE
    }


def values(path: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(path)
    return {record.key: reader.tensor(record) for record in reader.manifest.tensors}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_layout_is_made_from_any_other(
    saved: list[Path], tmp_path: Path, source: int, target: int
) -> None:
    """Bitwise: values, parameters, rows with their padding, settings, and who holds what."""
    made = reshard(
        saved[source],
        tmp_path,
        LAYOUTS[target][1],
        bucket_size=300,
        vocab_multiple=4,
        drop_rank_values=True,
    )
    assert verify(made).problems == ()
    got, expected = read_manifest(made), read_manifest(saved[target])
    for name in ("step", "topology", "params", "rows", "children", "groups"):
        assert getattr(got, name) == getattr(expected, name), name
    assert placed(got) == placed(expected)
    found = values(made)
    for key, tensor in values(saved[target]).items():
        assert torch.equal(found[key], tensor), key
    assert len(found) == len(expected.tensors)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 6), (6, 0), (1, 1)])
def test_the_files_are_those_of_the_run(
    saved: list[Path], tmp_path: Path, source: int, target: int
) -> None:
    """Bitwise: every data file, where frozen parameters need no other cut."""
    made = reshard(
        saved[source], tmp_path, LAYOUTS[target][1], bucket_size=300, drop_rank_values=True
    )
    files = {path.name: path.read_bytes() for path in saved[target].glob("*.safetensors")}
    assert {path.name: path.read_bytes() for path in made.glob("*.safetensors")} == files
    assert len(files) == LAYOUTS[target][1].world


def test_a_resharded_checkpoint_is_loaded_by_a_run(saved: list[Path], tmp_path: Path) -> None:
    """Bitwise."""
    made = reshard(saved[5], tmp_path, LAYOUTS[2][1], drop_rank_values=True)
    for found in run_ranks(cases.load_all, 2, {"tensor": 2}, [str(made)]):
        assert found == {str(made): []}


@pytest.mark.parametrize(
    ("source", "target", "optimizer", "state"),
    [(0, 4, "whole", "step"), (4, 2, "normuon", "second_moment")],
)
def test_states_that_owners_hold_go_to_the_owners_of_the_target(
    tmp_path: Path, source: int, target: int, optimizer: str, state: str
) -> None:
    """Exact: who holds which box of a state that is no row, and that all values came along."""
    paths = [
        Path(
            run_ranks(
                reshard_cases.save_owned,
                LAYOUTS[i][1].world,
                tmp_path / str(i),
                LAYOUTS[i][0],
                optimizer,
            )[0]
        )
        for i in (source, target)
    ]
    made = reshard(
        paths[0], tmp_path / "made", LAYOUTS[target][1], bucket_size=300, vocab_multiple=4
    )
    got, expected = placed(read_manifest(made)), placed(read_manifest(paths[1]))
    assert got == expected
    assert f"layers.1.stack/{state}" in got and f"layers.0.router/{state}" in got
    found = values(made)
    for key, tensor in values(paths[0]).items():
        assert torch.equal(found[key], tensor), key
