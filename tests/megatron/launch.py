"""Runs a Megatron case on a rank: first the process is made to look like one with a GPU.

    on_ranks(2, "training_cases", "side_by_side", flags)

The worker that runs such a case imports Megatron with its warnings ignored; it stays patched, so
the package's fixture starts and ends with workers of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.harness import run_ranks, shutdown_pool


class _Launcher:
    """Starts workers anew where those at hand have not all run the same cases.

    Workers that have run Megatron and new ones count process groups differently, and wait for each
    other. Workers beyond the first two sit out most cases.
    """

    def __init__(self) -> None:
        self._ranks = 0

    def __call__(self, ranks: int, module: str, name: str, *args: object) -> list[Any]:
        """`run` on several ranks."""
        if ranks > 2 and ranks != self._ranks:
            shutdown_pool()
        self._ranks = ranks
        return run_ranks(run, ranks, module, name, *args, timeout=300)


on_ranks = _Launcher()


def run(module: str, name: str, *args: object) -> Any:
    """Call `tests.megatron.<module>.<name>(*args)`; the error has what Megatron printed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
    }
    from tests.megatron import cuda_on_cpu

    cuda_on_cpu.install()
    case: Callable[..., Any] = getattr(importlib.import_module(f"tests.megatron.{module}"), name)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return case(*args)
    except Exception as error:
        error.add_note("Megatron printed, last:\n" + printed.getvalue()[-3000:])
        raise
