"""Skips a module where what it needs is not installed, without importing it."""

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


def emerging() -> None:
    """Skip the calling module unless emerging-optimizers is there; with Megatron it has to be."""
    if find_spec("emerging_optimizers") is not None:
        return
    if find_spec("megatron") is not None:
        pytest.fail("emerging-optimizers is missing beside megatron-core", pytrace=False)
    pytest.skip(
        "needs emerging-optimizers, and with it Python 3.12; `make test-megatron` installs both",
        allow_module_level=True,
    )
