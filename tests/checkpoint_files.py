"""A small checkpoint, written without a model: two stepped parameters and a buffer on two ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.commit import commit
from megatron_lw.dist_checkpointing.data_file import Blob, write_data_file
from megatron_lw.dist_checkpointing.directory import step_directory
from megatron_lw.dist_checkpointing.dtypes import dtype_name
from megatron_lw.dist_checkpointing.manifest import (
    MASTER,
    VALUE,
    ChildRecord,
    FileRecord,
    Manifest,
    ParamRecord,
    Piece,
    RowRecord,
    Run,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.storage import Storage
from megatron_lw.optimizer.boxes import Box

ROWS, COLUMNS = 6, 4
STEP = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of a logical tensor."""

    rank: int
    name: str
    state: str
    box: Box


def tensors_of(seed: int) -> dict[tuple[str, str], torch.Tensor]:
    """The logical tensors, by name and state."""
    chance = torch.Generator().manual_seed(seed)
    found = {}
    for state in (MASTER, "momentum"):
        found["layers.0.weight", state] = torch.randn(ROWS, COLUMNS, generator=chance)
        found["layers.0.bias", state] = torch.randn(ROWS, generator=chance)
    found["layers.0.scale", VALUE] = torch.randn((), generator=chance).bfloat16()
    found["layers.0.none", VALUE] = torch.empty(0, 3)
    return found


def parts() -> list[Part]:
    """Rank 0 holds the first rows of the weight and a bit of the next; rank 1 the rest."""
    found = []
    for state in (MASTER, "momentum"):
        for rank, box in (
            (0, Box((0, 0), (3, COLUMNS))),
            (0, Box((3, 0), (1, 3))),
            (1, Box((3, 3), (1, 1))),
            (1, Box((4, 0), (2, COLUMNS))),
        ):
            found.append(Part(rank=rank, name="layers.0.weight", state=state, box=box))
        found.append(Part(rank=1, name="layers.0.bias", state=state, box=Box((0,), (ROWS,))))
    found.append(Part(rank=0, name="layers.0.scale", state=VALUE, box=Box((), ())))
    found.append(Part(rank=1, name="layers.0.none", state=VALUE, box=Box((0, 0), (0, 3))))
    return found


def write_checkpoint(storage: Storage, root: Path, *, step: int = STEP, seed: int = 0) -> Path:
    """Write and commit one; tensors and values follow from the seed."""
    directory = step_directory(root, step)
    storage.make_directory(directory)
    commit(storage, directory, write_files(storage, directory, step=step, seed=seed))
    return directory


def write_files(storage: Storage, directory: Path, *, step: int = STEP, seed: int = 0) -> Manifest:
    """Write the data files only; returns the manifest."""
    tensors = tensors_of(seed)
    pieces: dict[tuple[str, str], list[Piece]] = {key: [] for key in tensors}
    files: list[FileRecord] = []
    for rank in range(2):
        mine = [part for part in parts() if part.rank == rank]
        blobs = [
            Blob(
                key=f"{part.name}/{part.state}",
                start=part.box.start,
                tensor=cut(tensors[part.name, part.state], part.box),
            )
            for part in mine
        ]
        written = write_data_file(storage, directory, rank, blobs)
        assert written is not None
        files.append(written.record)
        for part, offset in zip(mine, written.offsets, strict=True):
            piece = Piece(box=part.box, file=rank, offset=offset)
            pieces[part.name, part.state].append(piece)
    records = tuple(
        TensorRecord(
            name=name,
            state=state,
            dtype=dtype_name(tensors[name, state].dtype),
            shape=tuple(tensors[name, state].shape),
            pieces=tuple(sorted(found, key=lambda piece: piece.box.start)),
        )
        for (name, state), found in sorted(pieces.items())
    )
    return replace(_rest(seed), step=step, tensors=records, files=tuple(files))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    slices = (slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
    return tensor[tuple(slices)].contiguous()


def _rest(seed: int) -> Manifest:
    return Manifest(
        step=0,
        topology={"world": 2, "dp": 2, "tp": 1},
        params=(
            _param("layers.0.bias", (ROWS,), None),
            _param("layers.0.weight", (ROWS, COLUMNS), ROWS + 2),
        ),
        tensors=(),
        rows=(
            RowRecord(
                bucket="dense/muon/layers.0.weight",
                rank=0,
                length=15,
                runs=(Run(name="layers.0.weight", start=0, numel=15),),
                padding=(),
            ),
            RowRecord(
                bucket="dense/muon/layers.0.weight",
                rank=1,
                length=26,
                runs=(
                    Run(name="layers.0.weight", start=0, numel=9),
                    Run(name="layers.0.bias", start=17, numel=ROWS),
                ),
                padding=((9, 17), (23, 26)),
            ),
        ),
        files=(),
        children={
            "muon": ChildRecord(
                num_steps=seed,
                state_keys=("momentum",),
                backend=None,
                values={"layers.0.weight": {"scale": 0.25}},
            )
        },
        groups={"all": {"lr": 0.1 * seed, "betas": {"$tuple": [0.9, 0.99]}}},
        values={"loss_scaler": None, "extra": {"tokens": seed}},
        values_by_rank=({"position": 1}, {"position": 2}),
    )


def _param(name: str, shape: tuple[int, ...], stored_rows: int | None) -> ParamRecord:
    return ParamRecord(
        name=name,
        names=(name,),
        dtype="bfloat16",
        shape=shape,
        stored_rows=stored_rows,
        child="muon",
        group="all",
        domain="dense",
        tp_dim=None,
        blocks=None,
        split_blocks=True,
        qkv=None,
        matrices=1,
        is_stack=False,
        role="matrix",
    )
