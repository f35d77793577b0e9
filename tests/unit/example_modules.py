"""Imports the examples, which are scripts beside each other and not a package."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Import a module of the examples by its bare name, as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        module = importlib.import_module(name)
    if Path(str(module.__file__)).parent != EXAMPLES:
        raise ImportError(f"{name} is {module.__file__}, not the example of that name")
    return module
