"""Megatron's cases run in workers of their own: those stay patched (see `launch.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import shutdown_pool


@pytest.fixture(scope="package", autouse=True)
def _own_workers() -> Iterator[None]:
    shutdown_pool()
    yield
    shutdown_pool()
