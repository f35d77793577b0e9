"""Reads data files: every byte that is handed out has been held against its chunk's checksum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.dtypes import raw_bytes
from megatron_lw.dist_checkpointing.headers import placed
from megatron_lw.dist_checkpointing.manifest import CHUNK_NBYTES, FileRecord, Manifest, checksum
from megatron_lw.dist_checkpointing.storage import Storage, file_errors
from megatron_lw.errors import CheckpointError

Contents = Callable[[int, int], str]
"""What lies from one byte of a file to another, for messages."""

_CACHED = 2
_NAMED = 4


class VerifiedFile:
    """A data file open for reading. For one thread at a time; close it, or use it with `with`.

    A chunk that a read covers goes straight to where it is wanted. Of others the last two are
    kept, so that reading a file from its beginning to its end reads each chunk once.
    """

    def __init__(
        self,
        storage: Storage,
        directory: Path,
        record: FileRecord,
        contents: Contents | None = None,
    ) -> None:
        """Open it.

        Args:
            storage: where it is.
            directory: the checkpoint's directory.
            record: what the manifest says of it.
            contents: names what a broken chunk holds; see `contents_of`.

        Raises:
            CheckpointError: it is not there, or has another size.
        """
        self._path = directory / record.name
        self._record = record
        self._contents = contents
        self._cache: dict[int, memoryview] = {}
        with file_errors(self._path, "opened"):
            self._file = storage.open(self._path)
        size = self._file.size()
        if size != record.nbytes:
            self._file.close()
            raise CheckpointError(
                f"{self._path}: has {size} bytes, but the manifest says {record.nbytes}"
            )

    def read_into(self, offset: int, out: memoryview | torch.Tensor) -> None:
        """Fill `out` with the bytes from `offset` on.

        Args:
            offset: first byte.
            out: writable bytes, or a contiguous tensor of any dtype in host memory.

        Raises:
            CheckpointError: a chunk's checksum differs, or the file ends before.
        """
        if isinstance(out, torch.Tensor):
            out = raw_bytes(out).numpy().data
        if not 0 <= offset <= offset + out.nbytes <= self._record.nbytes:
            raise CheckpointError(
                f"{self._path}: bytes {offset} to {offset + out.nbytes} "
                f"do not lie in its {self._record.nbytes}"
            )
        while out.nbytes:
            chunk, skip = divmod(offset, CHUNK_NBYTES)
            length = self._length(chunk)
            count = min(length - skip, out.nbytes)
            if count == length:
                self._read_chunk(chunk, out[:count])
            else:
                out[:count] = self._cached(chunk)[skip : skip + count]
            offset, out = offset + count, out[count:]

    def check(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Read all of it; return what is broken, chunk by chunk.

        Args:
            progress: called with the bytes of each chunk that has been read.
        """
        problems: list[str] = []
        buffer = memoryview(bytearray(min(CHUNK_NBYTES, self._record.nbytes)))
        for chunk in range(len(self._record.checksums)):
            length = self._length(chunk)
            try:
                self._read_chunk(chunk, buffer[:length])
            except CheckpointError as error:
                problems.append(str(error))
            if progress is not None:
                progress(length)
        return problems

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _length(self, chunk: int) -> int:
        return min(CHUNK_NBYTES, self._record.nbytes - chunk * CHUNK_NBYTES)

    def _cached(self, chunk: int) -> memoryview:
        found = self._cache.pop(chunk, None)
        if found is None:
            oldest = next(iter(self._cache)) if len(self._cache) == _CACHED else None
            buffer = None if oldest is None else self._cache.pop(oldest)
            length = self._length(chunk)
            if buffer is None or buffer.nbytes < length:
                buffer = memoryview(bytearray(length))
            found = buffer[:length]
            self._read_chunk(chunk, found)
        self._cache[chunk] = found
        return found

    def _read_chunk(self, chunk: int, out: memoryview) -> None:
        start = chunk * CHUNK_NBYTES
        with file_errors(self._path, "read"):
            self._file.read_into(start, out)
        found, expected = checksum([out]), self._record.checksums[chunk]
        if found != expected:
            holds = self._contents(start, start + out.nbytes) if self._contents else ""
            raise CheckpointError(
                f"{self._path}: chunk {chunk} (bytes {start} to {start + out.nbytes}) is damaged: "
                f"XXH3 {found}, but the manifest says {expected}"
                + (f"; it holds {holds}" if holds else "")
            )


def contents_of(manifest: Manifest, file: int) -> Contents:
    """What lies where in a data file, by name.

    Args:
        manifest: the checkpoint.
        file: index into `Manifest.files`.
    """

    def contents(start: int, stop: int) -> str:
        within = (
            entry.key
            for offset, entry in placed(manifest)[file]
            if offset < stop and offset + entry.nbytes > start
        )
        names = list(dict.fromkeys(within))
        named = ", ".join(names[:_NAMED])
        more = len(names) - _NAMED
        return f"{named} and {more} more" if more > 0 else named or "the header"

    return contents
