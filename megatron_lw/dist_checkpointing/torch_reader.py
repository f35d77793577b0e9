"""Our checkpoints for `torch.distributed.checkpoint.load`: its `StorageReader`, without pickle.

    load(state_dict, storage_reader=TorchReader(path))

Keys are `model.NAME` and `optimizer.NAME.STATE`. Torch's planner finds what overlaps with what is
asked for, for plain tensors, DTensors and everything else that it knows. What it leaves unchecked
is checked here: that the saved pieces cover a request, that dtypes agree, and every checksum. An
error on one rank is raised by torch as its `CheckpointException` on all.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron_lw.dist_checkpointing.catalogue import (
    Source,
    state_dict_sources,
    state_dict_values,
)
from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.manifest import Piece
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.reading import Read, carry_out
from megatron_lw.dist_checkpointing.storage import Storage
from megatron_lw.dist_checkpointing.values import Encoded
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box


class TorchLoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, to which values that are no tensors come as they are.

    The default one takes them pickled, and our files hold no pickle.
    """

    def set_value(self, key: str, value: Any) -> None:
        """Put a value where the state dict to be loaded has `key`.

        Args:
            key: of the flat state dict.
            value: takes the place of what is there.
        """
        if not self.flatten_state_dict:
            self.state_dict[key] = value
            return
        *path, last = self.mappings[key]
        container: Any = self.original_state_dict
        for step in path:
            container = container[_own_key(container, step)]
        container[_own_key(container, last)] = value


class TorchReader(StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`.

    Args:
        path: a root (its newest committed checkpoint is read) or a checkpoint's directory.
        storage: how files are read.
    """

    def __init__(self, path: str | os.PathLike[str], storage: Storage | None = None) -> None:
        self._path = path
        self._storage = storage
        self._reader: CheckpointReader | None = None
        self._sources: dict[str, Source] = {}
        self._values: dict[str, Encoded] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another path next, if one is given."""
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the checkpoint offers, from its manifest.

        Raises:
            CheckpointError: nothing committed is there, or its manifest is not whole.
        """
        self._reader = CheckpointReader(self._path, self._storage)
        manifest = self._reader.manifest
        self._sources = state_dict_sources(manifest)
        self._values = state_dict_values(manifest)
        offered: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: BytesStorageMetadata() for key in self._values
        }
        offered |= {key: _tensor_metadata(source) for key, source in self._sources.items()}
        return Metadata(state_dict_metadata=offered)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        """Nothing to prepare: `read_metadata` opened the checkpoint on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The planner's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Check what is asked for, then read it in the order in which it lies in the files.

        Raises:
            CheckpointError: something was not saved, or has another dtype; or a checksum is wrong.
        """
        reader = self._open_reader()
        if not isinstance(planner, DefaultLoadPlanner):
            raise CheckpointError(
                f"planner = {type(planner).__name__}: use DefaultLoadPlanner or a class derived "
                "from it, whose requests can be checked"
            )
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        self._check(tensors, planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_value(item.storage_index.fqn, item.dest_index.fqn, planner)
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        reads = [self._read(item, target) for item, target in zip(tensors, targets, strict=True)]
        carry_out(reads, reader.manifest, reader.directory, reader.storage)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint may be at this path."""
        return os.path.isdir(checkpoint_id)

    def _open_reader(self) -> CheckpointReader:
        if self._reader is None:
            raise CheckpointError(f"{self._path}: read_metadata must come before read_data")
        return self._reader

    def _check(self, items: list[ReadItem], planner: DefaultLoadPlanner) -> None:
        """Check that every request has the saved dtype and is covered by what was saved."""
        covered: Counter[MetadataIndex] = Counter()
        for item in items:
            covered[item.dest_index] += math.prod(item.lengths)
            key, target = item.dest_index.fqn, planner.lookup_tensor(item.dest_index)
            saved = dtype_of(self._sources[key].dtype, key)
            if target.dtype != saved:
                raise CheckpointError(
                    f"{key!r} was saved as {saved} and is asked for as {target.dtype}: load it as "
                    f"{saved}, and cast it afterwards"
                )
        for key, target in planner.state_dict.items():
            if key not in self._sources:
                continue
            asked: Counter[MetadataIndex] = Counter()
            for chunk in _create_chunk_list(target):
                asked[MetadataIndex(key, chunk.offsets)] += math.prod(chunk.sizes)
            for index, numel in asked.items():
                if covered[index] != numel:
                    raise CheckpointError(
                        f"{key!r}: {numel} elements from {tuple(index.offset or ())} are asked "
                        f"for, of which {covered[index]} were saved: its shape is "
                        f"{self._sources[key].record.shape}"
                    )

    def _load_value(self, key: str, target: str, planner: DefaultLoadPlanner) -> None:
        if not isinstance(planner, TorchLoadPlanner):
            raise CheckpointError(
                f"{target!r} is no tensor, and {type(planner).__name__} would unpickle it: pass "
                "planner=TorchLoadPlanner()"
            )
        planner.set_value(target, self._open_reader().value(self._values[key], key))

    def _read(self, item: ReadItem, target: torch.Tensor) -> Read:
        record = self._sources[item.storage_index.fqn].record
        piece = self._piece(item.storage_index)
        return Read(
            file=piece.file,
            offset=piece.offset,
            piece=piece.box.shape,
            part=Box(tuple(item.storage_offsets), tuple(item.lengths)),
            dtype=dtype_of(record.dtype, record.key),
            target=target,
        )

    def _piece(self, index: MetadataIndex) -> Piece:
        """The piece that a plan means: the hint may be missing or stale, the offset counts."""
        pieces = self._sources[index.fqn].record.pieces
        start = None if index.offset is None else tuple(index.offset)
        hinted = pieces[index.index : index.index + 1] if index.index is not None else ()
        for piece in (*hinted, *pieces):
            if piece.box.start == start:
                return piece
        raise CheckpointError(f"{index.fqn!r}: nothing was saved at {start}")


def _tensor_metadata(source: Source) -> TensorStorageMetadata:
    record = source.record
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(source.dtype, record.key)),
        size=torch.Size(record.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(p.box.start), torch.Size(p.box.shape))
            for p in record.pieces
        ],
    )


def _own_key(container: Any, step: str | int) -> Any:
    """A key of a container from the path that torch's flattening made of it, in strings."""
    if isinstance(container, dict):
        return next((key for key in container if str(key) == step), step)
    return step
