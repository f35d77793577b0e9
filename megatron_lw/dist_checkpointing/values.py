"""Values that are no tensors, as JSON that keeps their types.

None, booleans, integers below 2**53, finite floats, strings, lists, and dictionaries whose keys are
strings stand for themselves. Everything else is an object with one key that starts with "$" and
names the type. Nothing here can name code, so decoding executes nothing. Equal values give equal
JSON: the entries of a dictionary are sorted.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from megatron_lw.dist_checkpointing.dtypes import CODES
from megatron_lw.errors import CheckpointError

Encoded: TypeAlias = "bool | int | float | str | list[Encoded] | dict[str, Encoded] | None"
"""A JSON tree."""

Put: TypeAlias = Callable[[torch.Tensor], str]
Take: TypeAlias = Callable[[str], torch.Tensor]

MAX_DEPTH = 100
_EXACT = 1 << 53  # integers that every reader of JSON keeps
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
)
_SCALARS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        name: np.dtype(name).newbyteorder("<")
        for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
        "float16 float32 float64 complex64 complex128".split()
    }
)


def encode(value: object, *, put: Put, where: str = "value") -> Encoded:
    """Encode a value; tensors and numpy arrays are put aside.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, `OrderedDict`, `Counter`,
            tensor, numpy array or scalar, torch dtype, device or size, nested at will. It is not
            changed, and the result shares nothing with it.
        put: called with each tensor, detached and contiguous, in the order of the JSON tree;
            returns the name under which `decode` asks for it. May share memory with the value.
        where: what messages call the value.

    Raises:
        CheckpointError: something in it has another type, or is part of itself.
    """
    return _Encoder(put).encode(value, where, 0)


def decode(encoded: Encoded, *, take: Take, where: str = "value") -> Any:
    """Inverse of `encode`, to the type and the bit.

    Args:
        encoded: a JSON tree, from any source: reading it executes nothing.
        take: called with the name of each tensor; an array shares memory with what it returns.
        where: what messages call the value.

    Raises:
        CheckpointError: it is no encoding of a value.
    """
    return _Decoder(take).decode(encoded, where, 0)


def tensor_names(encoded: Encoded) -> Iterator[str]:
    """The names under which `decode` would ask for tensors."""
    left = [encoded]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            left += each.values()
            yield from (v for k, v in each.items() if k in _ASIDE and isinstance(v, str))


class _Encoder:
    def __init__(self, put: Put) -> None:
        self._put = put

    def encode(self, value: Any, where: str, depth: int) -> Encoded:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{where}: nested over {MAX_DEPTH} deep; is it part of itself?")
        if isinstance(value, np.generic):  # before float: numpy's float64 is one
            return {"$scalar": [*_scalar(value, where)]}
        kind = type(value)
        if kind in _PLAIN:
            return _plain(value)
        if kind in _CONTAINERS:
            return self._container(value, where, depth + 1)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._put(_checked(value, where))}
        if isinstance(value, np.ndarray) and kind is np.ndarray:
            return {"$array": self._put(_as_tensor(value, where))}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        raise CheckpointError(
            f"{where}: {kind.__name__} cannot be saved; leave it out, or turn it into numbers, "
            "strings, lists, dictionaries or tensors"
        )

    def _container(self, value: Any, where: str, depth: int) -> Encoded:
        if isinstance(value, dict):
            return self._dictionary(value, where, depth)
        items = [self.encode(item, f"{where}[{i}]", depth) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$size" if isinstance(value, torch.Size) else "$tuple": items}

    def _dictionary(self, value: dict[Any, Any], where: str, depth: int) -> Encoded:
        keys = {key: _key(key, where) for key in value}
        ordered = list(value) if isinstance(value, OrderedDict) else sorted(value, key=_order)
        items = [(keys[key], self.encode(value[key], _below(where, key), depth)) for key in ordered]
        if type(value) is dict and all(isinstance(k, str) and k[:1] != "$" for k, _ in items):
            return {str(key): item for key, item in items}
        tag = {OrderedDict: "$ordered", Counter: "$counter"}.get(type(value), "$dict")
        return {tag: [[key, item] for key, item in items]}


class _Decoder:
    def __init__(self, take: Take) -> None:
        self._take = take

    def decode(self, encoded: Encoded, where: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{where}: nested over {MAX_DEPTH} deep")
        if isinstance(encoded, list):
            return self._items(encoded, where, depth + 1)
        if not isinstance(encoded, dict):
            return encoded
        tag = next((key for key in encoded if key[:1] == "$"), None)
        if tag is None:
            return {
                key: self.decode(item, _below(where, key), depth + 1)
                for key, item in encoded.items()
            }
        if len(encoded) > 1:
            raise CheckpointError(f"{where}: {tag} stands beside other keys")
        try:
            return self._tagged(tag, encoded[tag], where, depth + 1)
        except (ValueError, TypeError, KeyError, RuntimeError, struct.error) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{where}: no value of type {tag}: {error}") from error

    def _items(self, items: list[Encoded], where: str, depth: int) -> list[Any]:
        return [self.decode(item, f"{where}[{i}]", depth) for i, item in enumerate(items)]

    def _tagged(self, tag: str, body: Encoded, where: str, depth: int) -> Any:
        if isinstance(body, str):
            if tag in _ASIDE:
                tensor = self._take(body)
                return tensor if tag == "$tensor" else tensor.numpy()
            if tag in _FROM_TEXT:
                return _FROM_TEXT[tag](body)
        elif isinstance(body, list):
            if tag in ("$tuple", "$size"):
                items = self._items(body, where, depth)
                return tuple(items) if tag == "$tuple" else torch.Size(items)
            if tag == "$scalar":
                return _from_scalar(body)
            if tag in _MAPPINGS:
                return _MAPPINGS[tag](self._pairs(body, where, depth))
        raise CheckpointError(f"{where}: {tag} is no type of a value, or holds what it cannot")

    def _pairs(self, body: list[Encoded], where: str, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in body:
            if not isinstance(pair, list) or len(pair) != 2:
                raise CheckpointError(f"{where}: an entry of a dictionary is no pair")
            key = self.decode(pair[0], where, depth)
            found[key] = self.decode(pair[1], _below(where, key), depth)
        if len(found) != len(body):
            raise CheckpointError(f"{where}: a dictionary has a key twice")
        return found


def _plain(value: str | bytes | float | None) -> Encoded:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}  # JSON joins surrogates
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, int) and not -_EXACT < value < _EXACT:
        return {"$int": hex(value)}
    return value


def _key(key: Any, where: str) -> Encoded:
    if type(key) not in _PLAIN or key != key:
        raise CheckpointError(
            f"{where}: the key {key!r} of type {type(key).__name__} cannot be saved; "
            "use strings, numbers, booleans, bytes or None"
        )
    return _plain(key)


def _order(key: object) -> tuple[str, str]:
    return type(key).__name__, repr(key)


def _below(where: str, key: object) -> str:
    return f"{where}.{key}" if isinstance(key, str) else f"{where}[{key!r}]"


def _scalar(value: np.generic, where: str) -> tuple[str, str]:
    layout = _SCALARS.get(value.dtype.name)
    if layout is None:
        raise CheckpointError(f"{where}: numpy {value.dtype} cannot be saved; use a Python value")
    return value.dtype.name, np.asarray(value, dtype=layout).tobytes().hex()


def _from_scalar(body: list[Encoded]) -> np.generic:
    name, text = body
    value: np.generic
    [value] = np.frombuffer(bytes.fromhex(str(text)), dtype=_SCALARS[str(name)])
    return value


def _checked(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:
        raise CheckpointError(
            f"{where}: a {type(tensor).__name__} cannot be saved; give a plain tensor, "
            "such as parameter.detach()"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in CODES:
        raise CheckpointError(
            f"{where}: a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device} "
            "cannot be saved; give a dense one of a common dtype"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _as_tensor(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    if not array.dtype.isnative or array.dtype.name not in _SCALARS:
        raise CheckpointError(
            f"{where}: an array of {array.dtype} cannot be saved; use native numbers, such as "
            f"array.astype('float64')"
        )
    return _checked(torch.from_numpy(np.array(array, order="C", copy=True)), where)


def _text(text: str) -> str:
    return bytes.fromhex(text).decode("utf-8", "surrogatepass")


def _float(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


_ASIDE = ("$tensor", "$array")
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_CONTAINERS = frozenset((list, tuple, dict, OrderedDict, Counter, torch.Size))
_MAPPINGS: Mapping[str, Callable[[dict[Any, Any]], Any]] = MappingProxyType(
    {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
)
_FROM_TEXT: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "$bytes": lambda text: base64.b64decode(text, validate=True),
        "$str": _text,
        "$int": lambda text: int(text, 16),
        "$float": _float,
        "$dtype": lambda text: _DTYPES[text],
        "$device": lambda text: torch.device(text),
    }
)
