"""What one rank does with a case: process group, seeds, call, reply, tear-down."""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call that every rank of a new group makes.

    Attributes:
        world_size: number of ranks that take part, 0 to world_size - 1.
        store: path of the file through which the ranks meet; new for every case.
        group_timeout: seconds after which gloo itself gives a collective up.
        call: the pickled pair of function and arguments.
    """

    world_size: int
    store: str
    group_timeout: float
    call: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Success:
    """The call returned `value`."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The call raised, or the process died.

    Attributes:
        when: `time.monotonic()`, one clock for all processes of a machine.
        types: qualified names of the exception's class and its bases; empty for a dead process.
        message: the exception's text.
        traceback: formatted traceback, with causes.
    """

    when: float
    types: tuple[str, ...]
    message: str
    traceback: str


Reply = Success | Failure


def qualified_names(exception_type: type[BaseException]) -> tuple[str, ...]:
    """Names of a class and its bases, most derived first, as they compare between processes."""
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in exception_type.__mro__)


def _tensor_from_bytes(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


class _ByValue(pickle.Pickler):
    """Pickles a dense CPU tensor as its own bytes.

    Torch's multiprocessing would pass a file descriptor of shared memory, plain pickle the whole
    storage behind a small view.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Replace a dense CPU tensor by dtype, shape and bytes; leave the rest to pickle."""
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.layout != torch.strided:
            return NotImplemented
        flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = bytearray(flat.view(torch.uint8).numpy().tobytes())
        return _tensor_from_bytes, (data, obj.dtype, obj.shape)


def dumps(value: object) -> bytes:
    """Pickle `value` with its tensors by value: detached, and without what lies around a view."""
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def attempt(call: Callable[[], object]) -> bytes:
    """Make a call and pickle what came of it, also where the result itself cannot be pickled."""
    try:
        return dumps(Success(value=call()))
    except BaseException as error:  # pytest's own outcomes and SystemExit are not Exceptions
        return dumps(
            Failure(
                when=time.monotonic(),
                types=qualified_names(type(error)),
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
            )
        )


def _start(rank: int, case: Case) -> object:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(case.store, case.world_size),
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=case.group_timeout),
    )
    function, arguments = pickle.loads(case.call)
    return function(*arguments)


def _finish(environment: dict[str, str], ignored: list[str]) -> None:
    """Undo the settings of the case; raise for exceptions that Python had only ignored."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()  # now, so that what a case leaves behind is reported as this case's
    found, ignored[:] = "\n".join(ignored), []
    if found:
        raise RuntimeError(f"exceptions that nothing could catch:\n{found}")


def serve(rank: int, connection: Connection, ignored: list[str]) -> None:
    """Run the cases that come over `connection` until the parent closes it.

    A case has two replies: one for the call, and, after the parent's word, one for the tear-down.
    The parent gives its word when every rank has replied, so that no rank closes its sockets while
    another still reads from them.

    Args:
        rank: this worker's rank.
        connection: to the parent.
        ignored: texts of exceptions that Python could only print; emptied after each case.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.set_warn_always(True)  # a warning given once a process would depend on the order of cases
    environment = dict(os.environ)
    gc.collect()
    gc.freeze()  # torch's own objects: collecting after each case then costs nothing
    try:
        connection.send_bytes(attempt(lambda: None))
        while True:
            case: Case = pickle.loads(connection.recv_bytes())
            with warnings.catch_warnings():
                connection.send_bytes(attempt(lambda: _start(rank, case)))  # noqa: B023
                connection.recv_bytes()
                connection.send_bytes(attempt(lambda: _finish(environment, ignored)))
    except (EOFError, ConnectionError):  # the parent has closed its end
        return
