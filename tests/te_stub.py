"""Transformer Engine's own Python tensor classes on a CPU, without its kernels.

The wheel `transformer-engine` alone is pure Python; `make setup` puts it into a folder of its own,
as an import of it that is not prepared fails. What it imports and is not there becomes a stand-in:
the compiled module `transformer_engine_torch` (enums, and functions that raise), triton, and four
packages that the tensors never call. Tensors are made with their constructors and `device="cpu"`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

FOLDER = Path(os.environ.get("TRANSFORMER_ENGINE_FOLDER", Path(sys.prefix) / "te"))
MISSING = f"the wheel transformer-engine is not in {FOLDER.name}/ of the environment; make setup"

# Values of the compiled enum, from the header that the wheel ships with.
DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
STAND_INS = (
    "einops",
    "onnx",
    "onnxscript",
    "pydantic",
    "pydantic.dataclasses",
    "triton",
    "triton.language",
    "triton.language.core",
    "triton.language.extra",
    "triton.language.standard",
    "triton.runtime",
)


def present() -> bool:
    """Whether the wheel is there."""
    return (FOLDER / "transformer_engine" / "pytorch").is_dir()


class _Numbered(type):
    """A class whose members exist once they are asked for, each with a number of its own."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(cls.__members__))
        return int(vars(cls)[name])

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if not name.startswith("__")}


class _Compiled(types.ModuleType):
    """The compiled module: enums by capital letters, kernels by small ones."""

    DType = enum.IntEnum("DType", DTYPES)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _Numbered(name, (), {})
        if not name[0].isupper():

            def made(*args: object, **kwargs: object) -> None:
                raise NotImplementedError(f"transformer_engine_torch.{name} needs a GPU")

        setattr(self, name, made)
        return made


def _stand_in(name: str) -> MagicMock:
    made = MagicMock(name=name, __spec__=None, __path__=[], __version__="3.0.0")
    if name == "pydantic.dataclasses":
        made.dataclass = dataclasses.dataclass
    return made


def _its_modules() -> dict[str, types.ModuleType]:
    names = ("transformer_engine", "transformer_engine_torch")
    return {name: m for name, m in sys.modules.items() if name.partition(".")[0] in names}


@contextmanager
def _among_modules(modules: dict[str, Any]) -> Iterator[None]:
    """Have modules in `sys.modules` for a while; others that are imported meanwhile stay."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in {**modules, **_its_modules()}:
            sys.modules.pop(name, None)


def _load() -> dict[str, types.ModuleType]:
    """Import Transformer Engine once; its modules by name, which are not left in `sys.modules`."""
    # These look for triton: let them see that it is missing, not a stand-in.
    for name in ("torch._inductor.runtime.hints", "torch._dynamo"):
        importlib.import_module(name)
    fakes: dict[str, Any] = {
        name: _stand_in(name)
        for name in STAND_INS
        if importlib.util.find_spec(name.partition(".")[0]) is None
    }
    fakes["transformer_engine_torch"] = _Compiled("transformer_engine_torch")
    # Then it loads no library, and does not try torch by itself.
    settings = {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "none"}
    path = [str(FOLDER), *sys.path]
    with (
        patch.dict(os.environ, settings),
        _among_modules(fakes),
        patch.object(sys, "path", path),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what its import warns about is not ours
        common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        importlib.import_module("transformer_engine.pytorch")
        return _its_modules()


_loaded: dict[str, types.ModuleType] = {}


@contextmanager
def installed() -> Iterator[Any]:
    """Make Transformer Engine importable for a while; later tests do not see it.

    Yields:
        The module `transformer_engine.pytorch`.
    """
    if not _loaded:
        _loaded.update(_load())
    with _among_modules(_loaded):
        yield _loaded["transformer_engine.pytorch"]
        _loaded.update(_its_modules())
