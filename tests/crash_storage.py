"""A file system in memory that knows what a crash can leave of it.

What has been flushed survives. Of names that were made, replaced or removed in a directory since
its last flush, any may survive and any may not, in whatever order they came; of bytes that were not
flushed, some, all or none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lw.dist_checkpointing.storage import ReadableFile, WritableFile
from megatron_lw.errors import CheckpointError


@dataclass(eq=False)
class Content:
    """The bytes of a file; `flushed` of them survive."""

    data: bytes = b""
    flushed: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: what was done, where, and to which file."""

    kind: str
    path: Path
    target: Path | None = None
    content: Content | None = None
    data: bytes = b""


Names = dict[Path, Content | None]  # of a directory: None


@dataclass
class MemoryStorage:
    """`Storage` in memory, which writes down every operation that changes something."""

    names: Names = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)

    def make_directory(self, path: Path) -> None:
        missing = [each for each in (path, *path.parents[:-1]) if each not in self.names]
        for each in reversed(missing):
            self.names[each] = None
            self.operations.append(Operation("make_directory", each))
            self.flush_directory(each.parent)

    def create(self, path: Path) -> WritableFile:
        if path in self.names:
            raise FileExistsError(17, "File exists", str(path))
        self._require_directory(path.parent)
        content = Content()
        self.names[path] = content
        self.operations.append(Operation("create", path, content=content))
        return _Writer(self, path, content)

    def open(self, path: Path) -> ReadableFile:
        return _Reader(path, self._content(path))

    def replace(self, source: Path, target: Path) -> None:
        content = self._content(source)
        del self.names[source]
        self.names[target] = content
        self.operations.append(Operation("replace", source, target, content))

    def flush_directory(self, path: Path) -> None:
        self.operations.append(Operation("flush_directory", path))

    def remove(self, path: Path) -> None:
        self._content(path)
        del self.names[path]
        self.operations.append(Operation("remove", path))

    def remove_directory(self, path: Path) -> None:
        self._require_directory(path)
        if self.list(path):
            raise OSError(39, "Directory not empty", str(path))
        del self.names[path]
        self.operations.append(Operation("remove", path))

    def list(self, path: Path) -> list[str]:
        return sorted(each.name for each in self.names if each.parent == path)

    def _content(self, path: Path) -> Content:
        content = self.names.get(path)
        if content is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return content

    def _require_directory(self, path: Path) -> None:
        if path != Path("/") and (path not in self.names or self.names[path] is not None):
            raise FileNotFoundError(2, "No such directory", str(path))


@dataclass
class _Writer:
    storage: MemoryStorage
    path: Path
    content: Content

    def write(self, views: Sequence[memoryview]) -> None:
        data = b"".join(views)
        self.content.data += data
        self.storage.operations.append(Operation("write", self.path, None, self.content, data))

    def flush(self) -> None:
        self.content.flushed = len(self.content.data)
        self.storage.operations.append(Operation("flush", self.path, None, self.content))

    def close(self) -> None:
        pass


@dataclass
class _Reader:
    path: Path
    content: Content

    def size(self) -> int:
        return len(self.content.data)

    def read_into(self, offset: int, out: memoryview) -> None:
        found = self.content.data[offset : offset + out.nbytes]
        out[: len(found)] = found
        if len(found) < out.nbytes:
            raise CheckpointError(f"{self.path}: ends at byte {len(self.content.data)}")

    def close(self) -> None:
        pass


def crashes(
    before: MemoryStorage, operations: Sequence[Operation], chance: random.Random, samples: int
) -> Iterator[tuple[str, MemoryStorage]]:
    """What a crash after each of the operations can leave, with words for it.

    Args:
        before: everything that was there, all of it flushed.
        operations: of the save that does not end.
        chance: decides what survives of what was not flushed.
        samples: random outcomes for each moment, besides three certain ones: all is lost, names
            survive without their bytes, all survives.
    """
    for count in range(len(operations) + 1):
        moment = f"crash after {count} of {len(operations)} operations"
        if count:
            last = operations[count - 1]
            moment += f", the last {last.kind} {last.path.name}"
        durable, pending, contents = _replay(before, operations[:count])
        for outcome in ("all lost", "names kept", "all kept", *range(samples)):
            names = dict(durable)
            for each in pending:
                if outcome in ("names kept", "all kept") or (
                    outcome != "all lost" and chance.random() < 0.5
                ):
                    _apply(names, each)
            left: Names = {}
            for path, content in names.items():
                if any(parent not in names for parent in path.parents[:-1]):
                    continue
                data = None if content is None else contents.get(content, content)
                left[path] = None if data is None else _surviving(data, outcome, chance)
            yield f"{moment}: {outcome}", MemoryStorage(left)


def _replay(
    before: MemoryStorage, operations: Sequence[Operation]
) -> tuple[Names, list[Operation], dict[Content, Content]]:
    """Names that survive, operations on names that may, and files as they are by then."""
    durable, pending = dict(before.names), list[Operation]()
    contents: dict[Content, Content] = {}
    for each in operations:
        if each.content is not None and each.kind in ("create", "write", "flush"):
            now = contents.setdefault(each.content, Content())
            now.data += each.data
            if each.kind == "flush":
                now.flushed = len(now.data)
        if each.kind == "flush_directory":
            for done in pending:
                if done.path.parent == each.path:
                    _apply(durable, done)
            pending = [other for other in pending if other.path.parent != each.path]
        elif each.kind in ("make_directory", "create", "replace", "remove"):
            pending.append(each)
    return durable, pending, contents


def _apply(names: Names, operation: Operation) -> None:
    if operation.kind in ("make_directory", "create"):
        names[operation.path] = operation.content
    else:
        names.pop(operation.path, None)
        if operation.target is not None:
            names[operation.target] = operation.content


def _surviving(content: Content, outcome: str | int, chance: random.Random) -> Content:
    data, flushed = content.data, content.flushed
    if outcome in ("all lost", "names kept"):
        data = data[:flushed]
    elif outcome != "all kept":
        data = data[: chance.randint(flushed, len(data))]
        holes = bytes(chance.choice((0, byte)) for byte in data[flushed:])
        data = data[:flushed] + holes
    return Content(data, len(data))
