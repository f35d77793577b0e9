"""`FileStorage` does what `Storage` says, also with many views and where the system writes less."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing.storage import FileStorage, read, write
from megatron_lw.errors import CheckpointError

STORAGE = FileStorage()


def test_many_views_arrive_in_order(tmp_path: Path) -> None:
    parts = [bytes([i % 251]) * (i % 5) for i in range(3000)]
    file = STORAGE.create(tmp_path / "f")
    file.write([memoryview(part) for part in parts])
    file.write([memoryview(b"end")])
    file.flush()
    file.close()
    assert (tmp_path / "f").read_bytes() == b"".join(parts) + b"end"


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 5))
def test_short_writes_are_continued(parts: list[bytes], most: int) -> None:
    written = bytearray()

    def writev(_: int, views: Sequence[memoryview]) -> int:
        some = b"".join(views)[:most]
        written.extend(some)
        return len(some)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", writev)
        patch.setattr(os, "open", lambda *_: 99)
        STORAGE.create(Path("f")).write([memoryview(part) for part in parts])
    assert bytes(written) == b"".join(parts)


def test_files_are_created_once_and_replaced_whole(tmp_path: Path) -> None:
    write(STORAGE, tmp_path / "a", b"1")
    with pytest.raises(CheckpointError, match="a: cannot be written: File exists"):
        write(STORAGE, tmp_path / "a", b"2")
    with pytest.raises(FileExistsError):
        STORAGE.create(tmp_path / "a")
    write(STORAGE, tmp_path / "b", b"2")
    STORAGE.replace(tmp_path / "b", tmp_path / "a")
    STORAGE.flush_directory(tmp_path)
    assert read(STORAGE, tmp_path / "a") == b"2"
    assert STORAGE.list(tmp_path) == ["a"]
    STORAGE.remove(tmp_path / "a")
    with pytest.raises(CheckpointError, match="a: cannot be read: No such file"):
        read(STORAGE, tmp_path / "a")


def test_reading_past_the_end_says_where_the_file_ends(tmp_path: Path) -> None:
    write(STORAGE, tmp_path / "a", b"12345")
    file = STORAGE.open(tmp_path / "a")
    out = bytearray(3)
    file.read_into(2, memoryview(out))
    assert (bytes(out), file.size()) == (b"345", 5)
    with pytest.raises(CheckpointError, match="a: ends at byte 5, 2 missing"):
        file.read_into(4, memoryview(out))
    file.close()


def test_directories_are_made_with_what_is_above_them(tmp_path: Path) -> None:
    STORAGE.make_directory(tmp_path / "a" / "b")
    STORAGE.make_directory(tmp_path / "a" / "b")
    STORAGE.make_directory(tmp_path / "a" / "c")
    assert STORAGE.list(tmp_path / "a") == ["b", "c"]
    STORAGE.remove_directory(tmp_path / "a" / "c")
    assert STORAGE.list(tmp_path / "a") == ["b"]
    assert STORAGE.list(tmp_path / "nowhere") == []
