"""The moment from which a checkpoint exists: its manifest is renamed into place."""

from __future__ import annotations

from pathlib import Path

from megatron_lw.dist_checkpointing.coverage import check_manifest
from megatron_lw.dist_checkpointing.directory import (
    MANIFEST,
    MANIFEST_TEMPORARY,
    require_step,
    superseded,
)
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.dist_checkpointing.manifest_json import to_bytes
from megatron_lw.dist_checkpointing.storage import Storage, file_errors, write
from megatron_lw.errors import CheckpointError


def commit(storage: Storage, directory: Path, manifest: Manifest) -> None:
    """Make a checkpoint of the data files in a directory; called by one process.

    All data files have been written and flushed. Until the rename, a checkpoint that is there is
    untouched; after it, its files that the new one does not share are removed.

    Args:
        storage: where to.
        directory: the checkpoint's directory.
        manifest: what it will hold.

    Raises:
        CheckpointError: the manifest breaks the contract, a data file is missing or has another
            size, or an operation failed. Unless that was the removal, nothing is committed.
    """
    check_manifest(manifest)
    require_step(directory, manifest)
    with file_errors(directory, "committed"):
        for file in manifest.files:
            _require_file(storage, directory / file.name, file.nbytes)
        if MANIFEST_TEMPORARY in storage.list(directory):
            storage.remove(directory / MANIFEST_TEMPORARY)
        write(storage, directory / MANIFEST_TEMPORARY, to_bytes(manifest))
        storage.flush_directory(directory.parent)
        storage.replace(directory / MANIFEST_TEMPORARY, directory / MANIFEST)
        storage.flush_directory(directory)
        for path in superseded(directory, manifest, storage):
            storage.remove(path)
        storage.flush_directory(directory)


def _require_file(storage: Storage, path: Path, nbytes: int) -> None:
    file = storage.open(path)
    try:
        found = file.size()
    finally:
        file.close()
    if found != nbytes:
        raise CheckpointError(f"{path}: has {found} bytes, but {nbytes} were written")
