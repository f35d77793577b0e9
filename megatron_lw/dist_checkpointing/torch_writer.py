"""`torch.distributed.checkpoint.save` into our format: its `StorageWriter`, without pickle.

    save(state_dict, storage_writer=TorchWriter(root, step=100))

Torch's planner says which rank writes which box; the tensors of the manifest have the keys of the
flat state dict as their names. Files, checksums, coverage and commit are those of every checkpoint.
An error on one rank is raised by torch as its `CheckpointException` on all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron_lw.dist_checkpointing.catalogue import STATE_DICT
from megatron_lw.dist_checkpointing.commit import commit
from megatron_lw.dist_checkpointing.data_file import Blob, write_data_file
from megatron_lw.dist_checkpointing.directory import step_directory
from megatron_lw.dist_checkpointing.dtypes import dtype_name
from megatron_lw.dist_checkpointing.frozen import PLANES
from megatron_lw.dist_checkpointing.manifest import (
    VALUE,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.snapshot import EXTRA
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage, make_directory
from megatron_lw.dist_checkpointing.values import Encoded, encode
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box
from megatron_lw.optimizer.names import natural_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor in a rank's file.

    Attributes:
        name: of the tensor.
        dtype: of its elements.
        shape: of the whole tensor.
        box: which part it is.
        offset: first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a rank has made of one item of its plan; travels to the coordinator.

    Attributes:
        file: the rank's file; None if it wrote none.
        parts: in that file: the item's own, or the tensors inside its value.
        value: what is no tensor.
    """

    file: FileRecord | None
    parts: tuple[Part, ...]
    value: Encoded = None


class TorchWriter(StorageWriter):
    """Writes a checkpoint for `torch.distributed.checkpoint.save`.

    Args:
        root: directory of the checkpoints, each a directory below it, named by its step.
        step: number of the checkpoint.
        storage: how files are written; the file system if None.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, step: int, storage: Storage | None = None
    ) -> None:
        self._root = Path(root)
        self._step = step
        self._storage = FileStorage() if storage is None else storage

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write below another root next, if one is given."""
        if checkpoint_id is not None:
            self._root = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what would leave no whole checkpoint.

        Raises:
            CheckpointError: ranks are to plan by themselves.
        """
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives = False: ranks that plan alone write no whole checkpoint; use True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave out empty parts: they hold nothing, and could displace a part that does."""
        return replace(plan, items=[item for item in plan.items if not _is_empty_part(item)])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number, and make the directory; on the coordinator."""
        make_directory(self._storage, self._directory)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Raises:
            CheckpointError: a value cannot be saved, or the file cannot be written.
        """
        if not isinstance(planner, DefaultSavePlanner):
            raise CheckpointError(
                f"planner = {type(planner).__name__}: use DefaultSavePlanner or a class derived "
                "from it; others hand over values pickled only"
            )
        content = _Content(planner)
        found = [content.add(item) for item in plan.items]
        file = content.write(self._storage, self._directory, plan.storage_data)
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=sum(content.tensors[at].nbytes for at in places),
                storage_data=Written(
                    file=file, parts=tuple(content.parts[at] for at in places), value=value
                ),
            )
            for item, (places, value) in zip(plan.items, found, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written; on the coordinator.

        Raises:
            CheckpointError: the parts do not tile their tensors.
        """
        commit(self._storage, self._directory, _manifest(self._step, metadata, results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether checkpoints can be written below this path."""
        return not Path(checkpoint_id).is_file()

    @property
    def _directory(self) -> Path:
        return step_directory(self._root, self._step)


class _Content:
    """What goes into a rank's file.

    Attributes:
        tensors: contiguous, in the order in which they were added.
        parts: what they are parts of; the offset is right once `write` has run.
    """

    def __init__(self, planner: DefaultSavePlanner) -> None:
        self.tensors: list[torch.Tensor] = []
        self.parts: list[Part] = []
        self._planner = planner

    def add(self, item: WriteItem) -> tuple[list[int], Encoded]:
        """Take an item of a plan; returns the places of its tensors, and what is no tensor."""
        key, first = item.index.fqn, len(self.tensors)
        if key.startswith((EXTRA, PLANES)):
            raise CheckpointError(
                f"{key!r}: names of tensors inside values begin with {EXTRA!r}, of FP8 planes with "
                f"{PLANES!r}; rename the key"
            )
        value: Encoded = None
        if item.type == WriteItemType.BYTE_IO:
            value = encode(
                self._planner.lookup_object(item.index),
                put=lambda tensor: self._put_aside(key, tensor),
                where=key,
            )
        elif item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            tensor = self._planner.resolve_data(item)
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{key}: the planner gave {type(tensor).__name__}, no tensor")
            self._append(key, tensor.detach(), tuple(item.tensor_data.size), box)
        return list(range(first, len(self.tensors))), value

    def write(self, storage: Storage, directory: Path, rank: int) -> FileRecord | None:
        """Write the file; returns None where there is nothing to write."""
        full = [i for i, tensor in enumerate(self.tensors) if tensor.numel()]
        order = sorted(full, key=lambda i: (self.parts[i].name, self.parts[i].box.start))
        blobs = [
            Blob(
                key=f"{self.parts[i].name}/{VALUE}",
                start=self.parts[i].box.start,
                tensor=self.tensors[i],
            )
            for i in order
        ]
        written = write_data_file(storage, directory, rank, blobs)
        if written is None:
            return None
        for i, offset in zip(order, written.offsets, strict=True):
            self.parts[i] = replace(self.parts[i], offset=offset)
        return written.record

    def _put_aside(self, key: str, tensor: torch.Tensor) -> str:
        """Take a tensor inside a value; only one rank writes the value, so the name is unique."""
        name = f"{EXTRA}{key}/{len(self.tensors)}"
        shape = tuple(tensor.shape)
        self._append(name, tensor, shape, Box((0,) * len(shape), shape))
        return name

    def _append(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box) -> None:
        if tuple(tensor.shape) != box.shape:
            raise CheckpointError(
                f"{name}: {tuple(tensor.shape)} elements for a part of shape {box.shape}"
            )
        self.tensors.append(tensor.contiguous())
        self.parts.append(
            Part(name=name, dtype=dtype_name(tensor.dtype), shape=shape, box=box, offset=0)
        )


def _is_empty_part(item: WriteItem) -> bool:
    """Whether an item is an empty part of a tensor that has elements."""
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size


def _manifest(step: int, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Manifest:
    files: list[FileRecord] = []
    records = {
        key: TensorRecord(
            name=key,
            state=VALUE,
            dtype=dtype_name(each.properties.dtype),
            shape=tuple(each.size),
            pieces=(),
        )
        for key, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    pieces: dict[str, list[Piece]] = {key: [] for key in records}
    values: dict[str, Encoded] = {}
    for result in (result for of_rank in results for result in of_rank):
        data: Written = result.storage_data
        if data.file is not None and data.file not in files:
            files.append(data.file)
        if result.index.fqn not in records:
            values[result.index.fqn] = data.value
        for part in data.parts:
            records.setdefault(
                part.name,
                TensorRecord(
                    name=part.name, state=VALUE, dtype=part.dtype, shape=part.shape, pieces=()
                ),
            )
            found = pieces.setdefault(part.name, [])
            if 0 not in part.shape:
                found.append(Piece(box=part.box, file=len(files) - 1, offset=part.offset))
    return Manifest(
        step=step,
        topology={"world": len(results)},
        params=(),
        tensors=tuple(
            replace(records[key], pieces=tuple(sorted(pieces[key], key=lambda p: p.box.start)))
            for key in sorted(records, key=natural_key)
        ),
        rows=(),
        files=tuple(files),
        children={},
        groups={},
        values={STATE_DICT: [[key, values[key]] for key in sorted(values, key=natural_key)]},
        values_by_rank=(),
    )
