"""The file operations of a checkpoint, all in one place.

Saving goes through a `Storage`, so that a test can record every operation and replay any beginning
of them, and so that another file system can take the place of the local one. What a rename or a new
file needs to survive a crash is explicit: a file is flushed before it is renamed, and its directory
after.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from megatron_lw.errors import CheckpointError

_MAX_VIEWS = 1024  # what Linux and macOS take in one writev


class WritableFile(Protocol):
    """A new file, written from its beginning to its end."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Append the bytes of all views."""

    def flush(self) -> None:
        """Return when everything written survives a crash."""

    def close(self) -> None:
        """Close it; flushes nothing."""


class ReadableFile(Protocol):
    """A file open for reading at any place."""

    def size(self) -> int:
        """Bytes."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            CheckpointError: the file ends before.
        """

    def close(self) -> None:
        """Close it."""


class Storage(Protocol):
    """What saving, loading and tidying up need of a file system; errors are `OSError`."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and what is missing above it; all of it survives a crash."""

    def create(self, path: Path) -> WritableFile:
        """Open a new file; `FileExistsError` if there is one."""

    def open(self, path: Path) -> ReadableFile:
        """Open a file that exists."""

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file, atomically, over another one if there is one."""

    def flush_directory(self, path: Path) -> None:
        """Return when names made, replaced and removed in a directory survive a crash."""

    def remove(self, path: Path) -> None:
        """Remove a file."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""

    def list(self, path: Path) -> list[str]:
        """Names in a directory, sorted; of one that is not there, none."""


class FileStorage:
    """`Storage` on a file system of the operating system."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and what is missing above it; all of it survives a crash."""
        missing = [each for each in (path, *path.parents) if not each.is_dir()]
        for each in reversed(missing):
            each.mkdir(exist_ok=True)  # another rank may make it too
            self.flush_directory(each.parent)

    def create(self, path: Path) -> WritableFile:
        """Open a new file; `FileExistsError` if there is one."""
        return _Writer(path)

    def open(self, path: Path) -> ReadableFile:
        """Open a file that exists."""
        return _Reader(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file, atomically, over another one if there is one."""
        os.replace(source, target)

    def flush_directory(self, path: Path) -> None:
        """Return when names made, replaced and removed in a directory survive a crash."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def list(self, path: Path) -> list[str]:
        """Names in a directory, sorted; of one that is not there, none."""
        return sorted(os.listdir(path)) if path.is_dir() else []


class _Writer:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, views: Sequence[memoryview]) -> None:
        for first in range(0, len(views), _MAX_VIEWS):
            self._write(list(views[first : first + _MAX_VIEWS]))

    def _write(self, views: list[memoryview]) -> None:
        left = sum(view.nbytes for view in views)
        while left:
            written = os.writev(self._descriptor, views)
            left -= written
            if left:  # a signal, or more than one call takes
                views = _after(views, written)

    def flush(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, out: memoryview) -> None:
        while out.nbytes:
            count = os.preadv(self._descriptor, [out], offset)
            if count == 0:
                raise CheckpointError(f"{self._path}: ends at byte {offset}, {out.nbytes} missing")
            offset, out = offset + count, out[count:]

    def close(self) -> None:
        os.close(self._descriptor)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """The views without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []


@contextmanager
def file_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an error of the file system into a `CheckpointError`.

    Args:
        path: what is worked on.
        action: what cannot be done with it, such as "read".
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be {action}: {error.strerror or error}") from error


def make_directory(storage: Storage, path: Path) -> None:
    """Make a directory with what is missing above it; nothing happens if it is there.

    Raises:
        CheckpointError: it cannot be made.
    """
    with file_errors(path, "made"):
        storage.make_directory(path)


def read(storage: Storage, path: Path) -> bytes:
    """All bytes of a file.

    Raises:
        CheckpointError: it cannot be opened or read.
    """
    with file_errors(path, "read"):
        file = storage.open(path)
        try:
            content = bytearray(file.size())
            file.read_into(0, memoryview(content))
        finally:
            file.close()
    return bytes(content)


def write(storage: Storage, path: Path, content: bytes) -> None:
    """Write a new file and flush it; flushing its directory is left to the caller.

    Raises:
        CheckpointError: it is there, or it cannot be written.
    """
    with file_errors(path, "written"):
        file = storage.create(path)
        try:
            file.write([memoryview(content)])
            file.flush()
        finally:
            file.close()
