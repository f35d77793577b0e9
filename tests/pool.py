"""Worker processes for several gloo ranks, kept warm between cases, and what a case came to."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from tests import worker
from tests.rank import Case, Failure, Reply

START_SECONDS = 180.0  # torch is imported
FINISH_SECONDS = 30.0  # the group is closed
GRACE_SECONDS = 2.0  # for the other ranks once one has failed

# How gloo tells one rank that another has gone: a consequence, leading only where nothing else is
# known.
_SECONDARY = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|pair closure|timed out",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    process: SpawnProcess
    connection: Connection
    trace: Path

    def stacks(self) -> str:
        """What faulthandler wrote when a fatal signal came, less its list of extension modules."""
        return self.trace.read_text().split("\nExtension modules:")[0]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What is known of a case: replies to the call, and, after that, to the tear-down."""

    replies: dict[int, Reply] = field(default_factory=dict)
    finished: dict[int, Reply] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    dead: bool = False

    def failures(self) -> dict[int, Failure]:
        """Failures by rank, the most telling first: a rank's own before a consequence, by time."""
        found: dict[int, Failure] = {}
        for part in (self.replies, self.finished):
            for rank, reply in part.items():
                if isinstance(reply, Failure):
                    found.setdefault(rank, reply)
        return dict(sorted(found.items(), key=lambda e: (_is_secondary(e[1]), e[1].when)))


def _is_secondary(failure: Failure) -> bool:
    return "builtins.RuntimeError" in failure.types and bool(_SECONDARY.search(failure.message))


class WorkerPool:
    """Worker processes, started when a case first needs them and reused until one is lost."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_cases = 0

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the live workers, by rank."""
        return [each.process.pid for each in self._workers]

    def run(
        self, call: bytes, world_size: int, timeout: float, *, stop_at_failure: bool
    ) -> Outcome:
        """Run one case on ranks 0 to `world_size` - 1.

        Args:
            call: the pickled pair of function and arguments.
            world_size: number of ranks.
            timeout: seconds until ranks that have not replied are killed.
            stop_at_failure: once a rank has failed, give the others a short grace only.
        """
        folder = self._grow(world_size)
        self._num_cases += 1
        store = folder / f"store-{self._num_cases}"
        case = Case(
            world_size=world_size,
            store=str(store),
            group_timeout=timeout + FINISH_SECONDS,
            call=call,
        )
        outcome = Outcome()
        try:
            for rank in range(world_size):
                self._tell(rank, pickle.dumps(case))
            self._drive(outcome, range(world_size), timeout, stop_at_failure)
        except BaseException:
            self.kill()
            raise
        if len(outcome.finished) < world_size:
            awaited = outcome.finished if len(outcome.replies) == world_size else outcome.replies
            outcome.stacks = self._abort([r for r in range(world_size) if r not in awaited])
        elif outcome.dead:
            self.kill()
        store.unlink(missing_ok=True)
        return outcome

    def _drive(self, outcome: Outcome, ranks: range, timeout: float, stop_at_failure: bool) -> None:
        """Collect the replies, then let all ranks close their group and collect that.

        A group is closed only when every rank has replied. Closing one while another rank is still
        in a collective would end that rank sooner, but after it, about one time in thirty, the next
        group of these processes never connects.
        """
        deadline = time.monotonic() + timeout
        while len(outcome.replies) < len(ranks):
            if stop_at_failure and outcome.failures():
                stop_at_failure = False
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not self._collect(outcome, outcome.replies, ranks, deadline):
                return
        for rank in ranks:
            self._tell(rank, b"close the group")
        deadline = time.monotonic() + FINISH_SECONDS
        while len(outcome.finished) < len(ranks):
            if not self._collect(outcome, outcome.finished, ranks, deadline):
                return

    def _collect(
        self, outcome: Outcome, part: dict[int, Reply], ranks: range, deadline: float
    ) -> bool:
        """Read what arrives next for `part`; False when nothing does in time."""
        ready = self._ready([rank for rank in ranks if rank not in part], deadline)
        for rank in ready:
            self._read(outcome, rank)
        return bool(ready)

    def _read(self, outcome: Outcome, rank: int) -> None:
        part = outcome.finished if rank in outcome.replies else outcome.replies
        try:
            part[rank] = pickle.loads(self._workers[rank].connection.recv_bytes())
        except (EOFError, OSError):
            outcome.dead = True
            part[rank] = outcome.finished[rank] = self._death(rank)

    def _death(self, rank: int) -> Failure:
        each = self._workers[rank]
        each.process.join()
        text = f"the process died with exit code {each.process.exitcode}"
        return Failure(
            when=time.monotonic(),
            types=(),
            message=text,
            traceback=f"{text}\n{each.stacks()}",
        )

    def _ready(self, ranks: Iterable[int], deadline: float) -> list[int]:
        rank_of = {self._workers[rank].connection: rank for rank in ranks}
        ready = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
        return sorted(rank for connection, rank in rank_of.items() if connection in ready)

    def _tell(self, rank: int, message: bytes) -> None:
        with suppress(OSError):  # a dead worker is reported when its reply is read
            self._workers[rank].connection.send_bytes(message)

    def _grow(self, world_size: int) -> Path:
        if not all(each.process.is_alive() for each in self._workers):
            self.kill()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        started = range(len(self._workers), world_size)
        for rank in started:
            self._workers.append(_spawn(rank, folder))
        outcome = Outcome()
        deadline = time.monotonic() + START_SECONDS
        while len(outcome.replies) < len(started):
            answered = self._collect(outcome, outcome.replies, started, deadline)
            if not answered or outcome.failures():
                self.kill()
                raise RuntimeError(f"workers did not start: {outcome.failures() or 'no answer'}")
        return folder

    def _abort(self, ranks: list[int]) -> dict[int, str]:
        """Kill every worker; return the stacks that `ranks` were in."""
        for rank in ranks:
            pid = self._workers[rank].process.pid
            if pid is not None and self._workers[rank].process.is_alive():
                os.kill(
                    pid, signal.SIGABRT
                )  # faulthandler writes the stacks, then the process ends
        for rank in ranks:
            self._workers[rank].process.join(FINISH_SECONDS)
        stacks = {rank: self._workers[rank].stacks() for rank in ranks}
        self.kill()
        return stacks

    def kill(self) -> None:
        """End every worker at once."""
        for each in self._workers:
            each.process.kill()
        self._forget()

    def shutdown(self) -> list[int | None]:
        """Let idle workers return; give their exit codes."""
        for each in self._workers:
            each.connection.close()
        for each in self._workers:
            each.process.join(FINISH_SECONDS)
            if each.process.is_alive():
                each.process.kill()
        return self._forget()

    def _forget(self) -> list[int | None]:
        codes = []
        for each in self._workers:
            each.process.join()
            codes.append(each.process.exitcode)
            each.process.close()
            each.connection.close()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        return codes


def _spawn(rank: int, folder: Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trace = folder / f"stacks-{rank}"
    trace.touch()
    process = context.Process(
        target=worker.main, args=(rank, theirs, str(trace)), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()  # so that the worker's death reads as the end of the file
    return _Worker(process=process, connection=ours, trace=trace)
