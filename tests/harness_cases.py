"""Functions that `test_harness.py` runs on ranks: workers import this file, not the tests."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import numpy as np
import torch
import torch.distributed as dist


def rank_and_size(base: int) -> tuple[int, int, int]:
    return base + dist.get_rank(), dist.get_world_size(), os.getpid()


def sums() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((3,), float(rank + 1))
    dist.all_reduce(mine)
    pair = dist.new_group(sorted({0, size - 1}))
    ends = torch.tensor([2.0**rank])
    if rank in (0, size - 1):
        dist.all_reduce(ends, group=pair)
    rows = [torch.empty(2, dtype=torch.bfloat16) for _ in range(size)]
    dist.all_gather(rows, torch.full((2,), rank, dtype=torch.bfloat16))
    return [mine, ends, torch.stack(rows)]


def fail_on(rank: int, then: str) -> None:
    """One rank raises; the others wait for it in a collective, loop, or return."""
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    if then == "collective":
        dist.barrier()
    elif then == "loop":
        wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def hang() -> None:
    """Rank 0 returns, rank 1 waits for an event and rank 2 for the others."""
    if dist.get_rank() == 1:
        wait_for_ever()
    elif dist.get_rank() == 2:
        dist.barrier()


def die_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def agree_and_raise(silent: int | None, kind: str) -> int:
    votes = torch.ones(1)
    dist.all_reduce(votes)
    if dist.get_rank() == silent:
        return 7
    if kind == "type":
        raise KeyError("bucket_size=3")
    raise ValueError(f"bucket_size=3 on {int(votes)} ranks")


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=1)


def torch_warning() -> None:
    torch.empty(3).resize_(0)
    torch.add(torch.ones(2), torch.ones(2), out=torch.empty(5))


class Noisy:
    """Fails where Python can only print."""

    def __del__(self) -> None:
        raise OSError("lost in a destructor")


def leave_noise(where: str) -> None:
    if where == "destructor":
        noisy = Noisy()
        noisy.self = noisy  # type: ignore[attr-defined]  # a cycle: only the collector frees it
    elif where == "file":
        open(__file__)
    else:
        thread = threading.Thread(target=warn, args=("from a thread",))
        thread.start()
        thread.join()


def surroundings() -> tuple[object, ...]:
    """What a case could leave to the next: settings, groups, keys in the store, filters."""
    groups = ["world"] if dist.group.WORLD is not None else []
    store = dist.distributed_c10d._get_default_store()
    return (
        os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        groups + ["other"] * (len(dist.distributed_c10d._world.pg_map) - 1),
        store.check(["left"]),
        list(warnings.filters),
    )


def soil() -> tuple[object, ...]:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    dist.new_group()
    dist.distributed_c10d._get_default_store().set("left", "behind")
    dist.all_reduce(torch.ones(1), async_op=True)
    return surroundings()


def randoms() -> tuple[float, float]:
    return float(torch.rand(())), float(np.random.rand())


def threads() -> tuple[object, ...]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], dist.get_backend()


def tensors(given: torch.Tensor) -> dict[str, torch.Tensor]:
    leaf = torch.ones(2, requires_grad=True)
    return {
        "given": given,
        "view": torch.arange(1_000_000)[3:5],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "bf16": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "fp8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "graph": leaf * 2,
    }


def unpicklable() -> object:
    return threading.Lock()
