"""Calls a function on several gloo ranks, in worker processes that stay warm between cases.

    results = run_ranks(function, 4, argument)                    # one result a rank, in order
    texts = expect_failure_on_all(function, 4, ConfigError, "bucket_size", argument)

`function` is a top-level function of an importable module, called as `function(*args)` on every
rank with `torch.distributed` initialised: gloo, a group of its own for each case, seeds fixed,
warnings errors. Results come back pickled, tensors by value. The workers do not rewrite `assert`:
return values and assert on them in the test, or use `torch.testing.assert_close`.

The first rank that fails decides the error. Ranks that hang are killed and their stacks shown; the
next case then starts new workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.pool import Outcome, WorkerPool
from tests.rank import Failure, Success, dumps, qualified_names

MAX_WORLD_SIZE = 8


class RankFailure(Exception):
    """A rank raised or died.

    Attributes:
        rank: the rank whose own error came first.
        traceback: that rank's traceback, or how its process ended.
    """

    def __init__(self, text: str, *, rank: int, traceback: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.traceback = traceback


class RankTimeout(RankFailure):
    """Ranks did not return in time; `ranks` names them and `traceback` holds their stacks."""

    def __init__(self, text: str, *, ranks: list[int], traceback: str) -> None:
        super().__init__(text, rank=ranks[0], traceback=traceback)
        self.ranks = ranks


_pool = WorkerPool()


def shutdown_pool() -> None:
    """End the workers of this session; called once, by `conftest.py`."""
    _pool.shutdown()


def _prepare(fn: Callable[..., Any], world_size: int, args: tuple[object, ...]) -> bytes:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size={world_size}: give 1 to {MAX_WORLD_SIZE}")
    return dumps((fn, args))


def _describe(fn: Callable[..., Any], world_size: int) -> str:
    return f"{fn.__module__}.{fn.__qualname__} on {world_size} ranks"


def _section(title: str, text: str) -> str:
    return f"\n--- {title} ---\n{text.rstrip()}"


def _last_line(failure: Failure) -> str:
    return failure.traceback.rstrip().splitlines()[-1] if failure.types else failure.message


def _timeout_error(name: str, outcome: Outcome, timeout: float) -> RankTimeout:
    ranks = sorted(outcome.stacks)
    stacks = "".join(_section(f"stacks of rank {r}", outcome.stacks[r]) for r in ranks)
    others = "".join(
        _section(f"rank {rank} failed", failure.traceback)
        for rank, failure in outcome.failures().items()
    )
    stage = "tear down" if set(ranks) <= outcome.replies.keys() else f"return within {timeout:g} s"
    text = f"{name}: ranks {ranks} did not {stage}{stacks}{others}"
    return RankTimeout(text, ranks=ranks, traceback=stacks)


def _failure_error(name: str, outcome: Outcome) -> RankFailure:
    failures = outcome.failures()
    rank, first = next(iter(failures.items()))
    others = "".join(
        f"\nrank {other}: {_last_line(failure)}"
        for other, failure in failures.items()
        if other != rank
    )
    if outcome.stacks:
        others += f"\nranks {sorted(outcome.stacks)} were still running and were killed"
    text = f"{name}: rank {rank} failed: {_last_line(first)}"
    text += _section(f"rank {rank}", first.traceback) + others
    return RankFailure(text, rank=rank, traceback=first.traceback)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: object, timeout: float = 60.0
) -> list[Any]:
    """Call `fn(*args)` on every rank of a new gloo group.

    Args:
        fn: a top-level function of an importable module.
        world_size: number of ranks, 1 to 8.
        *args: what can be pickled; tensors go by value.
        timeout: seconds for the call; the start of the workers does not count.

    Returns:
        The results in the order of ranks; tensors are copies on the CPU, detached.

    Raises:
        RankFailure: a rank raised or died; holds the first one's traceback.
        RankTimeout: ranks did not return in time; holds their stacks.
    """
    __tracebackhide__ = True
    call = _prepare(fn, world_size, args)
    outcome = _pool.run(call, world_size, timeout, stop_at_failure=True)
    if outcome.failures():
        raise _failure_error(_describe(fn, world_size), outcome)
    if outcome.stacks:
        raise _timeout_error(_describe(fn, world_size), outcome, timeout)
    replies = (outcome.replies[rank] for rank in range(world_size))
    return [reply.value for reply in replies if isinstance(reply, Success)]


def expect_failure_on_all(
    fn: Callable[..., Any],
    world_size: int,
    exception_type: type[BaseException],
    match: str,
    *args: object,
    timeout: float = 60.0,
) -> list[str]:
    """Assert that `fn(*args)` raises on every rank; return the messages in the order of ranks.

    No rank is told that another has failed, so a rank that waits for one runs into the timeout.

    Args:
        fn: a top-level function of an importable module.
        world_size: number of ranks, 1 to 8.
        exception_type: class that each rank's exception must be an instance of.
        match: regular expression searched for in each message.
        *args: what can be pickled.
        timeout: seconds for the call.

    Raises:
        AssertionError: a rank returned, died, or raised something else.
        RankTimeout: ranks did not return in time; holds their stacks.
    """
    __tracebackhide__ = True
    call = _prepare(fn, world_size, args)
    outcome = _pool.run(call, world_size, timeout, stop_at_failure=False)
    if outcome.stacks:
        raise _timeout_error(_describe(fn, world_size), outcome, timeout)
    expected = qualified_names(exception_type)[0]
    messages, wrong = [], ""
    for rank in range(world_size):
        reply = outcome.replies[rank]
        if isinstance(reply, Success):
            wrong += _section(f"rank {rank}", f"returned {reply.value!r}")
        elif expected not in reply.types or not re.search(match, reply.message):
            wrong += _section(f"rank {rank}", reply.traceback)
        else:
            messages.append(reply.message)
    wrong += "".join(
        _section(f"tear-down of rank {rank}", reply.traceback)
        for rank, reply in outcome.finished.items()
        if isinstance(reply, Failure) and reply is not outcome.replies[rank]
    )
    if wrong:
        name = _describe(fn, world_size)
        raise AssertionError(f"{name}: not every rank raised {expected} with {match!r}{wrong}")
    return messages
