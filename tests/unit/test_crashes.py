"""A save may end at any moment: the newest checkpoint is then the old or the new one, whole."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from megatron_lw.dist_checkpointing.commit import commit
from megatron_lw.dist_checkpointing.directory import (
    checkpoints,
    clean,
    latest,
    leftovers,
    prune,
    read_manifest,
    step_directory,
)
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.dist_checkpointing.storage import FileStorage
from megatron_lw.dist_checkpointing.verify import verify
from tests.checkpoint_files import STEP, write_checkpoint, write_files
from tests.crash_storage import Content, MemoryStorage, crashes

ROOT = Path("/runs/first")
SAMPLES = 3


def save(storage: MemoryStorage, step: int, seed: int, *, tidy: bool = True) -> None:
    """As all ranks together do it."""
    directory = step_directory(ROOT, step)
    storage.make_directory(directory)
    manifest = write_files(storage, directory, step=step, seed=seed)
    commit(storage, directory, manifest)
    if tidy:
        clean(ROOT, storage)
        prune(ROOT, 1, storage)


def newest(storage: MemoryStorage) -> Manifest | None:
    """The newest checkpoint; it and all others are verified."""
    names = storage.names.items()
    return _newest(frozenset((path, content and content.data) for path, content in names))


@cache  # most crashes leave what another has left
def _newest(names: frozenset[tuple[Path, bytes | None]]) -> Manifest | None:
    storage = MemoryStorage(
        {path: None if data is None else Content(data, len(data)) for path, data in names}
    )
    found = checkpoints(ROOT, storage)
    assert [verify(each, storage=storage).problems for each in found] == [()] * len(found)
    assert latest(ROOT, storage) == (found[-1] if found else None)
    return read_manifest(found[-1], storage) if found else None


def flushed(storage: MemoryStorage) -> MemoryStorage:
    """The same files in a storage that has recorded nothing."""
    return MemoryStorage(dict(storage.names))


@pytest.mark.parametrize(
    ("old", "step", "seed"),
    [
        (False, STEP, 1),  # the first checkpoint of a run
        (True, STEP + 1, 1),  # one more, after which the older one goes
        (True, STEP, 1),  # over one of the same step
        (True, STEP, 0),  # over one that is equal
    ],
)
def test_a_crash_leaves_the_old_or_the_new_checkpoint(old: bool, step: int, seed: int) -> None:
    before = MemoryStorage()
    if old:
        save(before, STEP, 0)
    earlier = newest(before)
    assert (earlier is not None) == old
    after = flushed(before)
    save(after, step, seed)
    later = newest(after)
    assert later is not None and leftovers(ROOT, after) == []
    found: set[bool] = set()
    partly = 0
    for moment, left in crashes(before, after.operations, random.Random(0), SAMPLES):
        manifest = newest(left)
        assert manifest in (earlier, later), moment
        found.add(manifest == later)
        partly += bool(leftovers(ROOT, left))
        clean(ROOT, left)
        assert newest(left) == manifest and leftovers(ROOT, left) == [], moment
        save(left, step, seed)
        assert newest(left) == later and leftovers(ROOT, left) == [], moment
        assert left.list(ROOT) == [step_directory(ROOT, step).name], moment
    assert found == {True, False} or (step, seed) == (STEP, 0)
    assert partly > 10 and len(after.operations) > 15


@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_what_a_killed_process_left_survives_the_next_crash(step: int) -> None:
    """It left names that are not flushed; another process goes on; then the machine goes down."""
    before = MemoryStorage()
    save(before, STEP, 0)
    earlier = newest(before)
    after = flushed(before)
    save(after, step, 1)
    later = newest(after)
    chance = random.Random(0)
    for count in range(len(after.operations) + 1):
        operations = after.operations[:count]
        *_, (_, killed) = crashes(before, operations, chance, 0)  # all kept, but not flushed
        tidied, saved = (MemoryStorage(dict(killed.names)) for _ in range(2))
        clean(ROOT, tidied)
        prune(ROOT, 1, tidied)
        for moment, left in crashes(before, [*operations, *tidied.operations], chance, 2):
            assert newest(left) in (earlier, later), (count, moment)
        save(saved, step, 1, tidy=False)
        *_, (_, lost), _, _ = crashes(before, [*operations, *saved.operations], chance, 0)
        assert newest(lost) == later, f"{count}: a save that has returned is lost"


@pytest.mark.parametrize("left_out", ["flush", "flush_directory"])
def test_a_save_that_flushes_too_little_is_found(left_out: str) -> None:
    """Without the flush of files, or of directories, some crash leaves neither old nor new."""
    before = MemoryStorage()
    save(before, STEP, 0)
    after = flushed(before)
    save(after, STEP, 1)
    operations = [each for each in after.operations if each.kind != left_out]
    with pytest.raises(AssertionError):
        for _, left in crashes(before, operations, random.Random(0), SAMPLES):
            assert newest(left) is not None


def test_both_storages_hold_the_same_files(tmp_path: Path) -> None:
    """What the crash tests see in memory is what a disk gets."""
    memory = MemoryStorage()
    write_checkpoint(memory, ROOT)
    write_checkpoint(FileStorage(), tmp_path)
    directory = step_directory(tmp_path, STEP)
    assert FileStorage().list(directory) == memory.list(step_directory(ROOT, STEP))
    for path in directory.iterdir():
        content = memory.names[step_directory(ROOT, STEP) / path.name]
        assert content is not None and content.data == path.read_bytes()
