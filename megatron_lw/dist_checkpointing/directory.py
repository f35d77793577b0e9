"""Checkpoints of a run: one directory each below the run's, committed once it has a manifest.

Only files that a save of ours can have written are ever removed, and nothing that the newest
committed checkpoint needs. Whatever removes first flushes what makes the removal safe: a rename
that a killed process left in memory must not get lost after the files that it replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_lw.dist_checkpointing.coverage import check_manifest
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.dist_checkpointing.manifest_json import DATA_FILE, from_bytes
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage, file_errors, read
from megatron_lw.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
MANIFEST_TEMPORARY = "manifest.json.tmp"
_STEP = re.compile(r"step-(\d{10,19})")
_TEMPORARY = re.compile(r"rank\d{5,9}-[0-9a-f]{16}\.tmp")


def step_directory(root: Path, step: int) -> Path:
    """The directory of a checkpoint, such as `root/step-0000000100`."""
    return root / f"step-{step:010d}"


def checkpoints(root: Path, storage: Storage | None = None) -> list[Path]:
    """The committed checkpoints of a run, by ascending step."""
    storage = storage or FileStorage()
    found = [each for each in _step_directories(root, storage) if _is_committed(each, storage)]
    return sorted(found, key=_step_of)


def latest(root: Path, storage: Storage | None = None) -> Path | None:
    """The committed checkpoint of the highest step; None if there is none.

    It may be damaged: loading it then raises, since silently going back to an older one would cost
    more than a look at the disk.
    """
    found = checkpoints(root, storage)
    return found[-1] if found else None


def resolve(path: Path, storage: Storage | None = None) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run.

    Raises:
        CheckpointError: there is none.
    """
    storage = storage or FileStorage()
    if _is_committed(path, storage):
        return path
    found = latest(path, storage)
    if found is not None:
        return found
    if _step_directories(path, storage):
        reason = "its checkpoints were never committed: the saves did not end"
    elif storage.list(path):
        reason = f"it holds neither {MANIFEST} nor a step-... directory with one"
    else:
        reason = "it is no directory, or empty"
    raise CheckpointError(f"{path}: no checkpoint there; {reason}")


def read_manifest(directory: Path, storage: Storage | None = None) -> Manifest:
    """Read the manifest of a checkpoint, and check it.

    Raises:
        CheckpointError: it is missing, damaged or inconsistent, or belongs to another step.
    """
    where = directory / MANIFEST
    manifest = from_bytes(read(storage or FileStorage(), where), str(where))
    check_manifest(manifest)
    require_step(directory, manifest)
    return manifest


def require_step(directory: Path, manifest: Manifest) -> None:
    """Raise if a directory is named after another step; any name without a step will do.

    Raises:
        CheckpointError: it is.
    """
    if _STEP.fullmatch(directory.name) and _step_of(directory) != manifest.step:
        raise CheckpointError(f"{directory}: its manifest is that of step {manifest.step}")


def prune(root: Path, keep_last: int, storage: Storage, *, saved: Path | None = None) -> list[Path]:
    """Remove all but the newest committed checkpoints.

    A checkpoint loses its manifest first, so that none is ever found with a part of its files.

    Args:
        root: directory of the run.
        keep_last: how many stay.
        storage: where they are.
        saved: stays too: what was just saved, also where a run went back to an earlier step.

    Returns:
        The directories that were removed; one that holds a file that is not ours stays, without
        ours.

    Raises:
        ConfigError: `keep_last` is below 1.
        CheckpointError: one cannot be removed.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last={keep_last}; keep at least the newest checkpoint")
    found = checkpoints(root, storage)
    old, kept = found[:-keep_last], found[-keep_last:]
    if old:
        for each in (*kept, root):
            with file_errors(each, "flushed"):
                storage.flush_directory(each)
    old = [directory for directory in old if directory != saved]
    for directory in old:
        with file_errors(directory, "removed"):
            storage.remove(directory / MANIFEST)
            storage.flush_directory(directory)
            _remove(directory, _uncommitted(directory, storage), storage)
    return old


def leftovers(root: Path, storage: Storage | None = None) -> list[Path]:
    """Files and directories of ours that no committed checkpoint needs.

    They are from saves that did not end. While a save runs, its files are among them.
    """
    storage = storage or FileStorage()
    found: list[Path] = []
    for directory in _step_directories(root, storage):
        found += _leftovers(directory, storage)
    return found


def clean(root: Path, storage: Storage) -> list[Path]:
    """Remove `leftovers`; call it while no save of this run is under way.

    Returns:
        What was removed.

    Raises:
        CheckpointError: something cannot be removed.
    """
    removed: list[Path] = []
    for directory in _step_directories(root, storage):
        found = _leftovers(directory, storage)
        if found:
            with file_errors(directory, "tidied up"):
                storage.flush_directory(directory)
                _remove(directory, found, storage)
            removed += found
    return removed


def superseded(directory: Path, manifest: Manifest, storage: Storage) -> list[Path]:
    """Files of ours in a checkpoint's directory that its manifest does not list."""
    listed = {file.name for file in manifest.files} | {MANIFEST}
    names = (name for name in storage.list(directory) if _is_ours(name) and name not in listed)
    return [directory / name for name in names]


def foreign(directory: Path, storage: Storage) -> list[str]:
    """Names in a checkpoint's directory that no save of ours can have made."""
    return [name for name in storage.list(directory) if not _is_ours(name)]


def _leftovers(directory: Path, storage: Storage) -> list[Path]:
    if not _is_committed(directory, storage):
        return _uncommitted(directory, storage)
    where = directory / MANIFEST
    try:
        manifest = from_bytes(read(storage, where), str(where))
    except CheckpointError:
        return []  # what it needs is not known
    return superseded(directory, manifest, storage)


def _uncommitted(directory: Path, storage: Storage) -> list[Path]:
    """What to remove of a directory without a manifest; last itself, if nothing is left in it."""
    names = storage.list(directory)
    ours = [directory / name for name in names if _is_ours(name)]
    return [*ours, directory] if len(ours) == len(names) else ours


def _remove(directory: Path, paths: list[Path], storage: Storage) -> None:
    for path in paths:
        if path != directory:
            storage.remove(path)
    if directory in paths:
        storage.remove_directory(directory)
        storage.flush_directory(directory.parent)
    elif paths:
        storage.flush_directory(directory)


def _is_ours(name: str) -> bool:
    if name in (MANIFEST, MANIFEST_TEMPORARY):
        return True
    return any(pattern.fullmatch(name) for pattern in (DATA_FILE, _TEMPORARY))


def _is_committed(directory: Path, storage: Storage) -> bool:
    return MANIFEST in storage.list(directory)


def _step_directories(root: Path, storage: Storage) -> list[Path]:
    found = (root / name for name in storage.list(root) if _STEP.fullmatch(name))
    return [each for each in found if each == step_directory(root, _step_of(each))]


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))
