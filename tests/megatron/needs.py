"""Skips a module where megatron-core is not installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def megatron() -> None:
    """Skip the calling module unless megatron-core is there."""
    if find_spec("megatron") is None:
        pytest.skip(
            "needs megatron-core, and with it Python 3.12; `make test-megatron` installs both",
            allow_module_level=True,
        )
