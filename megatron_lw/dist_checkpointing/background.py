"""Saving beside training: the loop waits for a copy to host memory, a thread does the rest.

The thread talks to the other ranks' threads over a process group of its own, so that its
collectives never meet those of training. One save at a time: the next waits for the one before, and
raises what that one failed with.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.entries import Entry
from megatron_lw.dist_checkpointing.snapshot import Snapshot
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import create_host_group
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CheckpointError, LayerWiseError
from megatron_lw.groups import ParallelGroups

Write = Callable[[Snapshot, Group], Path]
_Place = tuple[str, tuple[int, ...], torch.Size, torch.dtype]


class _Outcome:
    """What has become of a save; shared with its thread, so that the saver itself can be freed."""

    __slots__ = ("directory", "error")

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.error: Exception | None = None


class BackgroundSaver:
    """Runs the saves of one optimizer, one after another.

    Args:
        groups: of the optimizer.

    Collective: creates a process group of all ranks, on gloo.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._control = groups.control
        self._group = create_host_group("checkpoint", groups.world)
        self._buffers: dict[_Place, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        # An error that no later call has raised is shown when the program ends.
        self._at_exit: weakref.finalize[..., BackgroundSaver] | None = None

    def start(self, snapshot: Snapshot, write: Write) -> None:
        """Copy what a rank saves, and write it beside training.

        Args:
            snapshot: whose tensors are copied before this returns.
            write: writes a snapshot, talking to other ranks over the group that it is given.

        Collective: an all-gather over `groups.control`; then, in the thread, those of `write`.

        Raises:
            CheckpointError: the save before has failed; on every rank.
        """
        self.wait()
        staged = attempt(lambda: self._stage(snapshot), self._control)
        outcome = self._outcome = _Outcome()
        thread = threading.Thread(
            target=_run, args=(write, staged, self._group, outcome), name="checkpoint"
        )
        self._thread = thread
        self._at_exit = weakref.finalize(self, _finish, thread, outcome)
        thread.start()

    def wait(self) -> Path | None:
        """Wait for the save under way.

        Returns:
            The directory of the last save; None if there was none.

        Raises:
            CheckpointError: it failed; raised once, on every rank.
        """
        self.join()
        if self._at_exit is not None:
            self._at_exit.detach()
            self._at_exit = None
        error, self._outcome.error = self._outcome.error, None
        if error is not None:
            raise _failed(error) from error
        return self._outcome.directory

    def join(self) -> None:
        """Let the save under way end; what it failed with is left to the next `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage(self, snapshot: Snapshot) -> Snapshot:
        """Copies in host memory, which the next save uses again."""
        before, self._buffers = self._buffers, {}
        staged = [self._staged(entry, before) for entry in snapshot.entries]
        if any(entry.tensor.is_cuda for entry in snapshot.entries):
            torch.cuda.synchronize()
        return replace(snapshot, entries=tuple(staged))

    def _staged(self, entry: Entry, before: Mapping[_Place, torch.Tensor]) -> Entry:
        place = (entry.key, entry.box.start, entry.tensor.shape, entry.tensor.dtype)
        buffer = before.get(place)
        if buffer is None:
            on_device = entry.tensor.is_cuda
            buffer = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, pin_memory=on_device)
        self._buffers[place] = buffer
        buffer.copy_(entry.tensor, non_blocking=True)
        return replace(entry, tensor=buffer)


def _run(write: Write, snapshot: Snapshot, group: Group, outcome: _Outcome) -> None:
    try:
        outcome.directory = write(snapshot, group)
    except Exception as error:
        outcome.error = error


def _finish(thread: threading.Thread, outcome: _Outcome) -> None:
    """At exit, or when the saver is dropped: wait, and say what no one has been told."""
    thread.join()
    if outcome.error is not None:
        raise _failed(outcome.error) from outcome.error


def _failed(error: Exception) -> LayerWiseError:
    return CheckpointError(
        f"a save in the background failed, and was not committed: {type(error).__name__}: {error}; "
        "checkpoints before it are whole"
    )
