"""Reading JSON that may hold anything: each field as the type that it must have, or a clear error.

A reader is called as `read(value, where)` and returns what it has checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from megatron_lw.dist_checkpointing.values import Encoded
from megatron_lw.errors import CheckpointError

_MAX = (1 << 63) - 1

T = TypeVar("T")


def parse(data: bytes, where: str) -> object:
    """Parse JSON, more strictly than Python does: no NaN, no infinity, no key twice.

    Raises:
        CheckpointError: it is no such JSON.
    """
    try:
        tree: object = json.loads(
            data,
            object_pairs_hook=_unique,
            parse_constant=_not_finite,
            parse_float=_finite,
            parse_int=_short,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: no valid JSON: {error}") from error
    return tree


class Fields:
    """The fields of a JSON object, each read once and as the type that it must have."""

    def __init__(self, tree: object, where: str) -> None:
        if not isinstance(tree, dict):
            raise CheckpointError(f"{where}: expected an object, found {tree!r:.40}")
        self.tree = tree
        self.where = where

    def take(self, key: str, read: Callable[[object, str], T]) -> T:
        """One field, read by `read(value, where)`."""
        where = f"{self.where}: {key}"
        if key not in self.tree:
            raise CheckpointError(f"{where} is missing")
        return read(self.tree.pop(key), where)

    def end(self) -> None:
        """Raise if fields are left that no one has asked for."""
        if self.tree:
            raise CheckpointError(f"{self.where}: unknown fields {sorted(self.tree)}")


def count(value: object, where: str) -> int:
    """An integer from 0 to 2**63 - 1; a boolean is none."""
    if type(value) is not int or not 0 <= value <= _MAX:
        raise CheckpointError(
            f"{where}: expected an integer from 0 to 2**63-1, found {value!r:.40}"
        )
    return value


def text(value: object, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: expected a string, found {value!r:.40}")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise CheckpointError(f"{where}: {value!a:.40} is no text")
    return value


def boolean(value: object, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: expected true or false, found {value!r:.40}")
    return value


def shape(value: object, where: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    found = tuple_of(count)(value, where)
    if math.prod(found) > _MAX:
        raise CheckpointError(f"{where}: {list(found)} has more than 2**63-1 elements")
    return found


def encoded(value: object, where: str) -> Encoded:
    """Any JSON; what it encodes is checked where it is decoded."""
    if isinstance(value, list | dict | str | int | float) or value is None:
        return value
    raise CheckpointError(f"{where}: no JSON")


def optional(read: Callable[[object, str], T]) -> Callable[[object, str], T | None]:
    """None, or what `read` reads."""
    return lambda value, where: None if value is None else read(value, where)


def tuple_of(read: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    """A list of what `read` reads."""

    def listed(value: object, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise CheckpointError(f"{where}: expected a list, found {value!r:.40}")
        return tuple(read(item, where) for item in value)

    return listed


def mapping_of(read: Callable[[object, str], T]) -> Callable[[object, str], Mapping[str, T]]:
    """An object whose values `read` reads."""

    def entries(value: object, where: str) -> Mapping[str, T]:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected an object, found {value!r:.40}")
        return {text(key, where): read(item, f"{where}: {key}") for key, item in value.items()}

    return entries


def items(value: object, number: int, where: str) -> list[Any]:
    """A list of so many items."""
    if not isinstance(value, list) or len(value) != number:
        raise CheckpointError(f"{where}: expected a list of {number}, found {value!r:.40}")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large")
    return value


def _short(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"{text:.40} is too large")
    return int(text)
