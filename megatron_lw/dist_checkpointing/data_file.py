"""Writes data files: safetensors files with a checksum per chunk, never overwritten in place.

Bytes go from where the tensors lie to the file: no copy of host memory, device memory by way of a
few pinned buffers. Another thread computes the checksums of the same bytes meanwhile. A file is
named after its content, so equal state gives equal files under equal names.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.dtypes import CODES, dtype_name, raw_bytes
from megatron_lw.dist_checkpointing.headers import HeaderEntry, file_order, header
from megatron_lw.dist_checkpointing.manifest import CHUNK_NBYTES, FileRecord, checksum
from megatron_lw.dist_checkpointing.storage import Storage, WritableFile, file_errors
from megatron_lw.errors import CheckpointError

_SLOTS = 4
"""Chunks under way at most: staged, being written, being summed."""
_FLUSH_NBYTES = 64 << 20
"""Bytes after which flushing begins, beside writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A piece to be written.

    Attributes:
        key: `TensorRecord.key` of its logical tensor.
        start: first index of the piece in it, in each dimension.
        tensor: its elements, contiguous, on any device.
    """

    key: str
    start: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def entry(self) -> HeaderEntry:
        """What the header says of it."""
        return HeaderEntry(self.key, self.start, tuple(self.tensor.shape), self.tensor.dtype)

    def parts(self) -> Iterator[torch.Tensor]:
        """Its elements, in order."""
        yield self.tensor.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyBlob:
    """A piece that is made when its turn comes, and let go of as it is written.

    Attributes:
        entry: what the header says of it.
        make: gives its elements in row-major order, in contiguous parts; called once.
    """

    entry: HeaderEntry
    make: Callable[[], Iterable[torch.Tensor]]

    def parts(self) -> Iterator[torch.Tensor]:
        """Its elements, in order.

        Raises:
            CheckpointError: `make` gave another dtype or number than the entry says.
        """
        numel = 0
        for part in self.make():
            if part.dtype != self.entry.dtype:
                raise CheckpointError(f"{self.entry.name}: made as {part.dtype}, not {self.entry}")
            numel += part.numel()
            yield part.detach()
        if numel != math.prod(self.entry.shape):
            raise CheckpointError(f"{self.entry.name}: {numel} elements made, not {self.entry}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A data file that has been written.

    Attributes:
        record: its name, size and checksums.
        offsets: the first byte of each blob, in the order in which they were given.
    """

    record: FileRecord
    offsets: tuple[int, ...]


def write_data_file(
    storage: Storage, directory: Path, rank: int, blobs: Sequence[Blob | LazyBlob]
) -> WrittenFile | None:
    """Write a data file, under a temporary name first; it and its directory are flushed.

    Needs at most 16 MiB of memory besides the header.

    Args:
        storage: where to.
        directory: the checkpoint's directory, which exists.
        rank: the global rank that writes.
        blobs: what to write; see `file_order` for where each comes to lie.

    Returns:
        What was written; None without blobs, for which there is no file.

    Raises:
        CheckpointError: two blobs have one name; a tensor is not contiguous, or of a dtype that
            the format lacks; the file cannot be written.
    """
    if not blobs:
        return None
    entries = [blob.entry for blob in blobs]
    _check(entries)
    order = file_order(entries)
    start = header([entries[i] for i in order])
    offsets = [0] * len(blobs)
    nbytes = len(start)
    for i in order:
        offsets[i] = nbytes
        nbytes += entries[i].nbytes
    temporary = directory / temporary_name(rank)
    with file_errors(temporary, "written"):
        file = storage.create(temporary)
        try:
            checksums = _write(file, start, [blobs[i] for i in order])
        finally:
            file.close()
        name = file_name(rank, nbytes, checksums)
        storage.replace(temporary, directory / name)
        storage.flush_directory(directory)
    record = FileRecord(name=name, rank=rank, nbytes=nbytes, checksums=checksums)
    return WrittenFile(record=record, offsets=tuple(offsets))


def temporary_name(rank: int) -> str:
    """A name that no other file has; one that is left over belongs to a save that never ended."""
    return f"rank{rank:05d}-{secrets.token_hex(8)}.tmp"


def file_name(rank: int, nbytes: int, checksums: Sequence[str]) -> str:
    """The name of a data file, from its size and the checksums of its chunks."""
    content = " ".join([str(nbytes), *checksums])
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return f"rank{rank:05d}-{digest}.safetensors"


def _check(entries: Sequence[HeaderEntry]) -> None:
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise CheckpointError(f"{entry.name}: written twice; leave one out")
        names.add(entry.name)
        if entry.dtype not in CODES:
            raise CheckpointError(f"{entry.name}: no checkpoint holds {dtype_name(entry.dtype)}")


class _Stream:
    """A file being written, its checksums being taken, and what is written being flushed.

    The last two run beside the first, on threads of their own: flushing only at the end would leave
    the disk idle while bytes are copied to the system's memory.
    """

    def __init__(self, file: WritableFile, threads: ThreadPoolExecutor) -> None:
        self._file = file
        self._threads = threads
        self._sums: list[Future[str]] = []
        self._flush: Future[None] | None = None
        self._unflushed = 0

    def append(self, staged: _Staged) -> None:
        """Write a chunk, once its bytes are there."""
        if staged.event is not None:
            staged.event.synchronize()
        self._sums.append(self._threads.submit(checksum, staged.views))
        self._file.write(staged.views)
        self._unflushed += CHUNK_NBYTES
        if self._unflushed >= _FLUSH_NBYTES and (self._flush is None or self._flush.done()):
            self._settle()
            self._flush = self._threads.submit(self._file.flush)
            self._unflushed = 0

    def wait_for(self, index: int) -> None:
        """Wait until nothing reads a chunk any more."""
        self._sums[index].result()

    def end(self) -> tuple[str, ...]:
        """Flush all of it; returns the checksum of each chunk."""
        self._settle()
        self._file.flush()
        return tuple(each.result() for each in self._sums)

    def _settle(self) -> None:
        if self._flush is not None:
            self._flush.result()


def _write(file: WritableFile, start: bytes, blobs: Sequence[Blob | LazyBlob]) -> tuple[str, ...]:
    """Write and flush header and tensors; return the checksum of each chunk."""
    stage = _Stage()
    ahead: list[_Staged] = []
    lies_there = all(isinstance(blob, Blob) and _on_host(blob.tensor) for blob in blobs)
    with ThreadPoolExecutor(2, "data file") as threads:
        stream = _Stream(file, threads)
        for index, parts in enumerate(_chunks(start, blobs)):
            if index >= _SLOTS and not lies_there:  # else checksums may lag: nothing is held
                stream.wait_for(index - _SLOTS)
            ahead.append(stage.views(index % _SLOTS, parts))
            if len(ahead) > 1:
                stream.append(ahead.pop(0))
        for each in ahead:
            stream.append(each)
        return stream.end()


@dataclass(frozen=True, slots=True)
class _Staged:
    """Bytes of a chunk, readable once `event` has happened."""

    views: list[memoryview]
    event: torch.cuda.Event | None


def _chunks(start: bytes, blobs: Sequence[Blob | LazyBlob]) -> Iterator[list[torch.Tensor]]:
    """Bytes of the file as uint8 tensors, chunk by chunk."""
    chunk: list[torch.Tensor] = []
    room = CHUNK_NBYTES
    for raw in _raw(start, blobs):
        done = 0
        while done < raw.numel():
            part = raw[done : done + room]
            chunk.append(part)
            done += part.numel()
            room -= part.numel()
            if room == 0:
                yield chunk
                chunk, room = [], CHUNK_NBYTES
    if chunk:
        yield chunk


def _raw(start: bytes, blobs: Sequence[Blob | LazyBlob]) -> Iterator[torch.Tensor]:
    yield torch.frombuffer(bytearray(start), dtype=torch.uint8)
    for blob in blobs:
        for part in blob.parts():
            if not part.is_contiguous():
                raise CheckpointError(
                    f"{blob.entry.name}: strides {part.stride()} of shape {tuple(part.shape)} "
                    "are not contiguous; give tensor.contiguous()"
                )
            yield raw_bytes(part)


class _Stage:
    """Host buffers for what lies on a device: one chunk each, used in turn."""

    def __init__(self) -> None:
        self._slots: list[torch.Tensor | None] = [None] * _SLOTS

    def views(self, slot: int, parts: Sequence[torch.Tensor]) -> _Staged:
        """Views of the parts, which are copied to the slot where they are not in host memory."""
        views: list[memoryview] = []
        event: torch.cuda.Event | None = None
        used = 0
        for part in parts:
            if not _on_host(part):
                target = self._buffer(slot, part.device)[used : used + part.numel()]
                target.copy_(part, non_blocking=True)
                used += part.numel()
                if part.is_cuda:
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(part.device))
                part = target
            views.append(part.numpy().data)
        return _Staged(views, event)

    def _buffer(self, slot: int, device: torch.device) -> torch.Tensor:
        buffer = self._slots[slot]
        if buffer is None:
            buffer = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._slots[slot] = buffer
        return buffer


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
