"""First thing a worker process runs: settings that must be in place before torch is imported.

Nothing here or in `tests/__init__.py` may import torch or numpy: both read the environment once,
and their own imports are to run under the strict warning filters too.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection


def loopback_name() -> str | None:
    """Name of the loopback interface: `lo` on Linux, `lo0` on macOS; None where unknown."""
    present = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in present), None)


def set_environment() -> None:
    """One thread a rank, and gloo on the loopback, so that no network or host name is needed."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if (loopback := loopback_name()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback


def record_ignored_exceptions(ignored: list[str]) -> None:
    """Collect what Python would only print: exceptions in destructors and in threads.

    A warning turned into an error inside a destructor (an unclosed file, say) comes this way. Only
    text is kept, so that no object is brought back to life.
    """

    def note(kind: type[BaseException], value: BaseException | None, where: str) -> None:
        ignored.append(where + "\n" + "".join(traceback.format_exception(kind, value, None)))

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        note(event.exc_type, event.exc_value, f"ignored in {event.object!r}")

    def in_thread(event: threading.ExceptHookArgs) -> None:
        name = event.thread.name if event.thread is not None else "an unknown thread"
        note(event.exc_type, event.exc_value, f"raised in {name}")

    sys.unraisablehook = unraisable
    threading.excepthook = in_thread


def main(rank: int, connection: Connection, trace_path: str) -> None:
    """Set the process up, then serve cases until the parent closes the connection.

    Args:
        rank: the rank that this worker has in every case.
        connection: carries cases here and replies back.
        trace_path: file that receives every thread's stack when a fatal signal arrives.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which then kills us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGABRT asks for stacks, not for a core file
    set_environment()
    ignored: list[str] = []
    record_ignored_exceptions(ignored)
    # No exceptions to this: torch 2.13 on gloo gives no warning in its collectives, objects,
    # batched sends, coalescing, DTensor, checkpoint or autograd. Only all_gather_into_tensor and
    # reduce_scatter_tensor do, being deprecated, and the library does not call them there. An
    # exception added here must name the call in torch that cannot be avoided.
    warnings.simplefilter("error")
    with open(trace_path, "w") as trace:
        faulthandler.enable(file=trace, all_threads=True)
        from tests.rank import serve

        serve(rank, connection, ignored)
        faulthandler.disable()
