"""From a checkpoint to plain safetensors files: the weights, whole, as the model has them.

One file, or several with an index where they are larger than a limit, laid out as model hubs expect
them. Weights are streamed: memory stays small whatever the model's size, and no process group is
needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.catalogue import Weight, weights
from megatron_lw.dist_checkpointing.dtypes import CODES, dtype_of
from megatron_lw.dist_checkpointing.headers import ALIGNMENT
from megatron_lw.dist_checkpointing.reader import CheckpointReader, blocks
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage, make_directory, write
from megatron_lw.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCK_NBYTES = 32 << 20
"""Most bytes of weights in memory at a time."""
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: their paths, in order; the index, where there is one, is not among them.
        num_weights: weights and buffers, a tied one once.
        nbytes: bytes of all of them.
        aliases: name of a weight with several copies that was not written -> name that was.
    """

    files: tuple[Path, ...]
    num_weights: int
    nbytes: int
    aliases: Mapping[str, str]


def export(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    max_shard_nbytes: int = 5 * 10**9,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights of a checkpoint as consolidated safetensors files.

    Every weight has the dtype that it has in the model and is the master cast to it; buffers and
    frozen parameters are as they were saved; padding rows are left out; a tied weight is written
    once, under its first name, and its other names stand in the metadata of the file.

    Args:
        src: a root (its newest committed checkpoint) or a checkpoint's directory.
        dst: a directory, made if it is missing; must hold no earlier export.
        max_shard_nbytes: most bytes of tensors in a file; a larger tensor has a file of its own.
        storage: how files are read and written.
        progress: told how many bytes are done.

    Raises:
        CheckpointError: nothing to export, the source is not whole, or the target is not free.
    """
    storage = FileStorage() if storage is None else storage
    target = Path(dst)
    if max_shard_nbytes < 1:
        raise CheckpointError(f"max_shard_nbytes = {max_shard_nbytes}: give at least 1")
    taken = [name for name in storage.list(target) if name.startswith("model")]
    if taken:
        raise CheckpointError(f"{target}: holds {taken[0]!r} already; export to another directory")
    reader = CheckpointReader(src, storage)
    found = weights(reader.manifest)
    if not found:
        raise CheckpointError(f"{reader.directory}: holds no weights to export")
    make_directory(storage, target)
    files = _divide(found, max_shard_nbytes)
    total = sum(_nbytes(weight) for weight in found)
    writer = _Writer(reader, total, progress)
    names = [_file_name(number, len(files)) for number in range(1, len(files) + 1)]
    for name, members in zip(names, files, strict=True):
        writer.write(target / name, members)
    if len(files) > 1:
        place = {w.name: name for name, ws in zip(names, files, strict=True) for w in ws}
        content = {"metadata": {"total_size": total}, "weight_map": place}
        write(storage, target / INDEX, json.dumps(content, indent=2, sort_keys=True).encode())
        storage.flush_directory(target)
    return Exported(
        files=tuple(target / name for name in names),
        num_weights=len(found),
        nbytes=total,
        aliases=_aliases(found),
    )


class _Writer:
    """Streams weights into files, and tells how far it is."""

    def __init__(self, reader: CheckpointReader, total: int, progress: Progress | None) -> None:
        self._reader = reader
        self._storage = reader.storage
        self._total = total
        self._progress = progress
        self._done = 0

    def write(self, path: Path, members: Sequence[Weight]) -> None:
        """Write one file, under a temporary name until it is whole."""
        temporary = path.with_name(path.name + ".tmp")
        try:
            file = self._storage.create(temporary)
            try:
                file.write([memoryview(_header(members))])
                for weight in members:
                    for block in self._blocks(weight):
                        file.write([block.view(torch.uint8).numpy().data])
                        self._advance(block.nbytes)
                file.flush()
            finally:
                file.close()
            self._storage.replace(temporary, path)
            self._storage.flush_directory(path.parent)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error}") from error

    def _blocks(self, weight: Weight) -> Iterator[torch.Tensor]:
        """The elements of a weight in order, a flat block at a time."""
        dtype = dtype_of(weight.dtype, weight.name)
        for box in blocks(weight.record.shape, BLOCK_NBYTES // dtype.itemsize):
            block = torch.empty(box.shape, dtype=dtype)
            self._reader.read(weight.record, box, block)
            yield block.reshape(-1)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _divide(found: Sequence[Weight], most: int) -> list[list[Weight]]:
    """Divide weights over files, in order."""
    files: list[list[Weight]] = [[]]
    room = most
    for weight in found:
        nbytes = _nbytes(weight)
        if files[-1] and nbytes > room:
            files.append([])
            room = most
        files[-1].append(weight)
        room -= nbytes
    # Larger elements first, so that every tensor is aligned to its own.
    return [
        sorted(members, key=lambda weight: -dtype_of(weight.dtype, weight.name).itemsize)
        for members in files
    ]


def _header(members: Sequence[Weight]) -> bytes:
    """First bytes of a file.

    Source: the safetensors format (https://github.com/huggingface/safetensors, README).
    """
    described: dict[str, object] = {"__metadata__": {"format": "pt", **_aliases(members)}}
    offset = 0
    for weight in members:
        stop = offset + _nbytes(weight)
        described[weight.name] = {
            "dtype": CODES[dtype_of(weight.dtype, weight.name)],
            "shape": weight.record.shape,
            "data_offsets": (offset, stop),
        }
        offset = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _aliases(members: Sequence[Weight]) -> dict[str, str]:
    return {alias: weight.name for weight in members for alias in weight.aliases}


def _nbytes(weight: Weight) -> int:
    return weight.record.numel * dtype_of(weight.dtype, weight.name).itemsize


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
