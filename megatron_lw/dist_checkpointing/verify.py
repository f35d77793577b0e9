"""Reads a whole checkpoint and names everything that is broken in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock

import torch

from megatron_lw.dist_checkpointing.coverage import encoded_values, problems
from megatron_lw.dist_checkpointing.directory import (
    MANIFEST,
    foreign,
    require_step,
    resolve,
    superseded,
)
from megatron_lw.dist_checkpointing.headers import HeaderEntry, header, placed
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.dist_checkpointing.manifest_json import from_bytes
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage, read
from megatron_lw.dist_checkpointing.values import decode
from megatron_lw.dist_checkpointing.verified_file import VerifiedFile, contents_of
from megatron_lw.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with the bytes that have been read and with all there are; from any thread."""

_MAX_THREADS = 8
_MAX_PROBLEMS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: the checkpoint.
        manifest: what it holds; None if that cannot be read.
        problems: what is broken, by name; empty for a whole checkpoint.
        leftovers: files of saves that did not end. They are not part of it and do no harm.
    """

    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]
    leftovers: tuple[Path, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is broken."""
        return not self.problems

    @property
    def nbytes(self) -> int:
        """Bytes of its data files."""
        return 0 if self.manifest is None else sum(file.nbytes for file in self.manifest.files)


def verify(
    path: str | Path, *, progress: Progress | None = None, storage: Storage | None = None
) -> VerifyReport:
    """Check everything about a checkpoint: each bit of its files is read.

    The manifest against its checksum and its contract; every chunk of the data files against its
    checksum; their headers, byte by byte, against what the manifest says; their sizes; values;
    files that do not belong there.

    Args:
        path: directory of a run, whose newest checkpoint is taken, or a checkpoint.
        progress: told how far reading is.
        storage: where files are; the file system if None.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    storage = storage or FileStorage()
    directory = resolve(Path(path), storage)
    where = directory / MANIFEST
    try:
        manifest = from_bytes(read(storage, where), str(where))
    except CheckpointError as error:
        return VerifyReport(path=directory, manifest=None, problems=(str(error),), leftovers=())
    found = list(islice(problems(manifest), _MAX_PROBLEMS))
    found += _step(directory, manifest)
    found += _values(manifest)
    found += _files(storage, directory, manifest, progress)
    found += [
        f"{directory / name}: belongs to no checkpoint; is it meant to be here?"
        for name in foreign(directory, storage)
    ]
    return VerifyReport(
        path=directory,
        manifest=manifest,
        problems=tuple(found),
        leftovers=tuple(superseded(directory, manifest, storage)),
    )


def _step(directory: Path, manifest: Manifest) -> Iterator[str]:
    try:
        require_step(directory, manifest)
    except CheckpointError as error:
        yield str(error)


def _values(manifest: Manifest) -> Iterator[str]:
    """Values that decode to nothing."""
    for where, encoded in encoded_values(manifest):
        try:
            decode(encoded, take=lambda _: torch.empty(0), where=where)
        except CheckpointError as error:
            yield str(error)


def _files(
    storage: Storage, directory: Path, manifest: Manifest, progress: Progress | None
) -> list[str]:
    """What is wrong with the data files; several are read at a time."""
    contents: list[list[tuple[int, HeaderEntry]] | None]
    try:
        contents = [*placed(manifest)]
    except CheckpointError:
        contents = [None for _ in manifest.files]  # named already; the bytes are still checked
    total = sum(file.nbytes for file in manifest.files)
    counter = _Counter(total, progress)

    def check(index: int) -> list[str]:
        return list(_file(storage, directory, manifest, index, contents[index], counter.add))

    threads = min(_MAX_THREADS, os.cpu_count() or 1, max(1, len(contents)))
    with ThreadPoolExecutor(threads, "verify") as pool:
        return [problem for found in pool.map(check, range(len(contents))) for problem in found]


def _file(
    storage: Storage,
    directory: Path,
    manifest: Manifest,
    index: int,
    content: list[tuple[int, HeaderEntry]] | None,
    add: Callable[[int], None],
) -> Iterator[str]:
    record = manifest.files[index]
    names = contents_of(manifest, index) if content is not None else None
    try:
        file = VerifiedFile(storage, directory, record, names)
    except CheckpointError as error:
        add(record.nbytes)
        yield str(error)
        return
    with file:
        broken = file.check(add)
        yield from broken
        if broken or content is None:
            return
        expected = header([entry for _, entry in content])
        if expected != _first_bytes(file, len(expected), record.nbytes):
            yield f"{directory / record.name}: its header does not say what the manifest does"


def _first_bytes(file: VerifiedFile, count: int, nbytes: int) -> bytes:
    found = bytearray(min(count, nbytes))
    file.read_into(0, memoryview(found))
    return bytes(found)


class _Counter:
    """Adds up what threads have read."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress
        self._lock = Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes, and tell."""
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
