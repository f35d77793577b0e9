"""Saving: collect, check, write one file a rank, merge, commit.

A checkpoint exists from the moment its manifest is renamed into place, whole; whatever fails before
leaves the one before it as it was.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lw.dist_checkpointing.account import CheckpointWarning
from megatron_lw.dist_checkpointing.background import BackgroundSaver
from megatron_lw.dist_checkpointing.commit import commit
from megatron_lw.dist_checkpointing.data_file import Blob, write_data_file
from megatron_lw.dist_checkpointing.directory import clean, latest, prune, step_directory
from megatron_lw.dist_checkpointing.merge import RankPart, WrittenPiece, merge
from megatron_lw.dist_checkpointing.snapshot import Snapshot, Stateful, take_snapshot
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage, make_directory
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import gather_objects
from megatron_lw.distributed.finalize import meet_in_reduces
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron_lw.distributed.ddp import DistributedDataParallel
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


def save(
    path: str | Path,
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int,
    keep_last: int | None = None,
    leave_out: Collection[str] = (),
    background: bool = False,
    storage: Storage | None = None,
) -> Path:
    """Write a checkpoint; when it returns, it is on the disk and committed.

    With `background` it returns as soon as everything is copied to host memory; the next save, and
    `wait`, wait for it and raise what it failed with.

    Weights are not written beside their masters: a weight is its master, cast.

    Args:
        path: directory of the run; the checkpoint is a directory in it. Every rank must see it.
        model: the wrapped chunk or chunks that the optimizer steps.
        optimizer: masters, states, settings and loss scale are saved.
        scheduler: anything with `state_dict`; saved too.
        extra: plain values, tensors and arrays by name: random-number state, position in the data.
            What is equal on all ranks is written once, the rest for each rank.
        step: number of the checkpoint; one of the same step is replaced.
        keep_last: delete all but so many of the newest checkpoints afterwards; None keeps all.
        leave_out: frozen parameters and buffers that are not saved: names, or patterns with `*`.
        background: write beside training.
        storage: where files are; the file system if None.

    Returns:
        The checkpoint's directory.

    Collective: gathers of small objects over `groups.control`, and after an overlapped backward the
    reduces that the step would start; in the background over a process
    group of its own, which the first such save creates; every rank calls it.

    Raises:
        CheckpointError: on every rank: copies that differ, a value that cannot be saved, an
            operation of the file system that failed. Nothing is committed, unless it says so.
        StateError: on every rank: a step failed half-way.
        ConfigError: on every rank: a wrong argument.
    """
    root, store = Path(path), storage or FileStorage()
    wait(optimizer)

    def check() -> int:
        number = check_save_arguments(step, keep_last)
        if optimizer.groups.control.rank == 0:
            _warn_of_later(root, number, store)
        return number

    step = attempt(check, optimizer.groups.control)
    meet_in_reduces(optimizer.model_chunks, optimizer.groups.control)
    snapshot = take_snapshot(model, optimizer, scheduler, extra, step=step, leave_out=leave_out)

    def write(snapshot: Snapshot, group: Group) -> Path:
        return write_snapshot(snapshot, root, group, store, keep_last=keep_last)

    if not background:
        return write(snapshot, optimizer.groups.control)
    if optimizer.saver is None:
        optimizer.saver = BackgroundSaver(optimizer.groups)
    optimizer.saver.start(snapshot, write)
    return step_directory(root, step)


def wait(optimizer: LayerWiseDistributedOptimizer) -> Path | None:
    """Wait for a save in the background; call it before the process groups are closed.

    Returns:
        The checkpoint that the last save in the background wrote; None if there was none.

    Raises:
        CheckpointError: on every rank, once: that save failed.
    """
    saver: BackgroundSaver | None = optimizer.saver
    return None if saver is None else saver.wait()


def check_save_arguments(step: int, keep_last: int | None) -> int:
    """Check what every rank passes alike; returns `step`, as Python's own kind of integer.

    Raises:
        ConfigError: a number is out of its range, or `step` is no integer.
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise ConfigError(f"step={step!r}; give an integer, the number of steps taken") from None
    if step < 0:
        raise ConfigError(f"step={step}; give the number of steps taken, 0 or more")
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"keep_last={keep_last}; keep at least the newest checkpoint, or None")
    return step


def _warn_of_later(root: Path, step: int, storage: Storage) -> None:
    """A run that went back to an earlier step leaves checkpoints that `latest` prefers."""
    newest = latest(root, storage)
    if newest is not None and int(newest.name.removeprefix("step-")) > step:
        warnings.warn(
            f"{newest} is of a later step than {step}, which is saved now: a load of {root} takes "
            "the later one; delete it, or save to another directory",
            CheckpointWarning,
            stacklevel=2,
        )


def write_snapshot(
    snapshot: Snapshot, root: Path, group: Group, storage: Storage, *, keep_last: int | None
) -> Path:
    """Write and commit what all ranks have collected.

    Args:
        snapshot: of this rank; its tensors do not change meanwhile.
        root: directory of the run.
        group: all ranks; a group of its own where it runs beside training.
        storage: where files are.
        keep_last: see `save`.

    Collective: gathers of small objects over `group`.
    """
    directory = step_directory(root, snapshot.part.step)
    first = group.rank == 0

    def prepare() -> None:
        if first:
            make_directory(storage, directory)

    def publish() -> None:
        if gathered is not None:
            commit(storage, directory, merge(gathered))
            try:
                clean(root, storage)
                if keep_last is not None:
                    prune(root, keep_last, storage, saved=directory)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{directory} is saved, but tidying up failed: {error}"
                ) from error

    attempt(prepare, group)
    part = attempt(lambda: _write(snapshot, directory, storage), group)
    gathered = gather_objects(part, group)
    attempt(publish, group)
    return directory


def _write(snapshot: Snapshot, directory: Path, storage: Storage) -> RankPart:
    """Write this rank's data file; returns its part of the manifest."""
    part, entries = snapshot.part, snapshot.entries
    blobs = [
        Blob(key=entry.key, start=entry.box.start, tensor=entry.tensor.contiguous())
        for entry in entries
    ]
    written = write_data_file(storage, directory, part.rank, blobs)
    if written is None:
        return part
    pieces = [
        WrittenPiece(
            name=entry.name,
            state=entry.state,
            dtype=entry.dtype,
            shape=entry.shape,
            box=entry.box,
            offset=offset,
        )
        for entry, offset in zip(entries, written.offsets, strict=True)
    ]
    return replace(part, pieces=tuple(pieces), file=written.record)
