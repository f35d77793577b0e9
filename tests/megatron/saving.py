"""Megatron's writer of checkpoints inside a test worker.

It wants psutil, for a figure that it logs, a server process for a queue, and for `--async-save` a
new process with a GPU. A worker may not leave processes behind, so here the queue is one of this
process, or of a forked writer that ends with the case.
"""

from __future__ import annotations

import multiprocessing
import queue
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.training import async_utils as training_async


@contextmanager
def writers(*, beside_training: bool) -> Iterator[None]:
    """Let Megatron save while this lasts.

    Args:
        beside_training: whether a forked process writes, for `--async-save`.
    """
    memory = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))
    theirs: Any = filesystem_async
    theirs.HAVE_PSUTIL = True
    theirs.psutil = types.SimpleNamespace(Process=lambda pid: memory)
    own: Any = multiprocessing.current_process()
    is_daemon = own._config.get("daemon")
    caller: Any = async_utils.PersistentAsyncCaller
    get_process = caller._get_process
    server: Any = None
    if beside_training:
        own._config["daemon"] = False  # else it may not have a child
        server = multiprocessing.get_context("fork").Manager()
        caller._get_process = classmethod(_forked(get_process))
    theirs._results_queue = queue.Queue() if server is None else server.Queue()
    try:
        yield
    finally:
        if beside_training:
            _close()
            server.shutdown()
        caller._get_process = get_process
        own._config["daemon"] = is_daemon
        theirs._results_queue = None


def _forked(get_process: Any) -> Any:
    def start(cls: type, rank: int, mp_mode: str = "fork", *options: Any) -> Any:
        return get_process(rank, "fork", *options)

    return start


def _close() -> None:
    """End the forked writer."""
    theirs: Any = training_async
    if theirs._async_calls_queue is not None:
        theirs._async_calls_queue.close()
        theirs._async_calls_queue = None
    async_utils.AsyncCallsQueue._persistent_caller = None
