"""Checkpoints of a run are found, kept and tidied up; nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lw.dist_checkpointing.directory import (
    MANIFEST,
    checkpoints,
    clean,
    latest,
    leftovers,
    prune,
    read_manifest,
    resolve,
    step_directory,
)
from megatron_lw.dist_checkpointing.storage import FileStorage
from megatron_lw.errors import CheckpointError, ConfigError
from tests.checkpoint_files import STEP, write_checkpoint, write_files

STORAGE = FileStorage()
LONG_AGO = "rank00000-0123456789abcdef"


def names(directory: Path) -> list[str]:
    return STORAGE.list(directory)


def test_the_newest_committed_checkpoint_is_found(tmp_path: Path) -> None:
    root = tmp_path / "new" / "run"
    assert latest(root) is None and checkpoints(root) == []
    for step in (9, 100, 10**10, 20):
        write_checkpoint(STORAGE, root, step=step)
    STORAGE.make_directory(step_directory(root, 10**10 + 1))
    (root / "step-7").mkdir()
    (root / "step-7" / MANIFEST).touch()
    (root / "step-00000000007").mkdir()
    (root / "step-00000000007" / MANIFEST).touch()
    steps = [9, 20, 100, 10**10]
    assert checkpoints(root) == [step_directory(root, step) for step in steps]
    assert latest(root) == resolve(root) == resolve(checkpoints(root)[-1])
    assert resolve(step_directory(root, 9)) == step_directory(root, 9)


def test_where_there_is_none_the_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is no directory, or empty"):
        resolve(tmp_path / "nowhere")
    STORAGE.make_directory(step_directory(tmp_path, 3))
    with pytest.raises(CheckpointError, match="never committed: the saves did not end"):
        resolve(tmp_path)
    write_files(STORAGE, step_directory(tmp_path, 3))
    with pytest.raises(CheckpointError, match=r"holds neither manifest.json nor a step-"):
        resolve(step_directory(tmp_path, 3))


def test_a_checkpoint_may_be_renamed_but_to_no_other_step(tmp_path: Path) -> None:
    directory = write_checkpoint(STORAGE, tmp_path)
    assert read_manifest(directory).step == STEP
    best = directory.rename(tmp_path / "best")
    assert read_manifest(resolve(best)).step == STEP
    other = best.rename(step_directory(tmp_path, STEP + 1))
    with pytest.raises(CheckpointError, match="step-0000000008: its manifest is that of step 7"):
        read_manifest(other)


def test_saving_a_step_again_removes_what_it_replaces(tmp_path: Path) -> None:
    directory = write_checkpoint(STORAGE, tmp_path, seed=0)
    first = names(directory)
    write_checkpoint(STORAGE, tmp_path, seed=0)
    assert names(directory) == first
    (directory / "notes.txt").touch()
    write_checkpoint(STORAGE, tmp_path, seed=1)
    second = names(directory)
    assert len(second) == len(first) + 1 and set(first) & set(second) == {MANIFEST}


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_pruning_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    for step in (3, 1, 2):
        write_checkpoint(STORAGE, tmp_path, step=step)
    write_files(STORAGE, _made(step_directory(tmp_path, 4)))
    removed = prune(tmp_path, keep, STORAGE)
    left = [step_directory(tmp_path, step) for step in (1, 2, 3)][-keep:]
    assert checkpoints(tmp_path) == left
    assert removed == [step_directory(tmp_path, step) for step in (1, 2, 3) if step <= 3 - keep]
    assert not any(directory.exists() for directory in removed)
    assert len(names(step_directory(tmp_path, 4))) == 2


def test_pruning_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last=0; keep at least"):
        prune(tmp_path, 0, STORAGE)


def test_pruning_leaves_files_that_are_not_ours(tmp_path: Path) -> None:
    old, new = (write_checkpoint(STORAGE, tmp_path, step=step) for step in (1, 2))
    (old / "notes.txt").write_text("the run in which it happened")
    prune(tmp_path, 1, STORAGE)
    assert names(old) == ["notes.txt"] and latest(tmp_path) == new


def test_leftovers_are_found_and_cleaned_and_nothing_else(tmp_path: Path) -> None:
    committed = write_checkpoint(STORAGE, tmp_path, step=1)
    whole = names(committed)
    damaged = write_checkpoint(STORAGE, tmp_path, step=2)
    (damaged / MANIFEST).write_bytes(b"?")
    unreadable = names(damaged)
    ended = _made(step_directory(tmp_path, 3))
    noted = _made(step_directory(tmp_path, 4))
    write_files(STORAGE, ended)
    ours = [
        committed / f"{LONG_AGO}.safetensors",
        committed / f"{LONG_AGO}.tmp",
        committed / f"{MANIFEST}.tmp",
        *(ended / name for name in names(ended)),
        ended,
        noted / f"{LONG_AGO}.tmp",
    ]
    others = [
        committed / "notes.txt",
        committed / f"{LONG_AGO}.safetensors.bak",
        committed / "rank1-0.tmp",
        noted / "model.pt",
        damaged / f"{LONG_AGO}.tmp",
        tmp_path / f"{LONG_AGO}.tmp",
        tmp_path / MANIFEST.upper(),
    ]
    for path in (*ours, *others):
        if not path.exists():
            path.touch()
    assert sorted(leftovers(tmp_path)) == sorted(ours)
    assert sorted(clean(tmp_path, STORAGE)) == sorted(ours)
    assert not any(path.exists() for path in ours) and all(path.exists() for path in others)
    assert set(whole) <= set(names(committed)) and set(unreadable) <= set(names(damaged))
    assert leftovers(tmp_path) == clean(tmp_path, STORAGE) == []


def _made(directory: Path) -> Path:
    STORAGE.make_directory(directory)
    return directory


@pytest.mark.parametrize("fails", ["remove", "flush_directory", "remove_directory"])
def test_what_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    for step in (1, 2):
        write_checkpoint(STORAGE, tmp_path, step=step)
    write_files(STORAGE, _made(step_directory(tmp_path, 3)))
    storage = FileStorage()
    monkeypatch.setattr(storage, fails, refuse)
    with pytest.raises(CheckpointError, match=r"step-0000000003: cannot be tidied up: Permission"):
        clean(tmp_path, storage)
    with pytest.raises(CheckpointError, match=r"cannot be (removed|flushed): Permission denied"):
        prune(tmp_path, 1, storage)
    assert latest(tmp_path) == step_directory(tmp_path, 2)
