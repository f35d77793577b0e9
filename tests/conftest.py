"""Settings that every test shares, and the end of the worker pool."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

from tests.worker import set_environment

set_environment()  # before torch is imported: it reads the number of threads once

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.harness import shutdown_pool  # noqa: E402
from tests.rank import SEED  # noqa: E402

torch.set_num_threads(1)  # as the ranks have, so that one process can be compared bit by bit
torch.set_warn_always(True)  # as the ranks do

# No deadline: a slow machine is not a failure. In CI the examples are the same on every run.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000)
_DEFAULT_PROFILE = "ci" if os.environ.get("CI") else "here"
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", _DEFAULT_PROFILE))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(scope="session", autouse=True)
def _worker_pool() -> Iterator[None]:
    yield
    shutdown_pool()


def pytest_collection_finish() -> None:
    """Spare the collector torch and all test modules, which stay: a seventh of the CPU time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
