"""Read a model's parameters from a JSON list of `{name, shape, kind}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from megatron_lw.errors import ConfigError
from megatron_lw.presets import Kind, ModelParam
from megatron_lw.topology import expert_of, layer_of

_REQUIRED = ("name", "shape", "kind")
_OPTIONAL = ("sharded", "tied")
_NUM_DIMS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "matrix": (2, 2),
        "vector": (0, 9),
        "embedding": (1, 9),
        "output": (1, 9),
        "conv": (3, 5),
        "expert_matrix": (2, 3),
        "expert_vector": (1, 2),
    }
)
_SHARDED = frozenset({"matrix", "embedding", "output", "expert_matrix"})


def read_model(path: Path) -> list[ModelParam]:
    """Read parameters from a JSON list.

    Each entry has a global `name`, a global `shape` and a `kind`: matrix, vector, embedding,
    output, conv, expert_matrix (one expert, or three dimensions for a stack) or expert_vector.
    Optional are `sharded`, whether tensor parallelism cuts it (by default matrices, embeddings and
    output layers), and `tied`. The layer is read from the name (`layers.N`), the expert too
    (`experts.N.`, `.weightN`).

    Raises:
        ConfigError: If the file cannot be read or an entry is not as described; names it.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model file {str(path)!r} is not readable JSON: {reason}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"model file {str(path)!r} must hold a non-empty JSON list of parameters")
    return [_param(entry, number) for number, entry in enumerate(entries)]


def _param(entry: Any, number: int) -> ModelParam:
    where = f"model file entry {number}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}, not an object with name, shape and kind")
    missing = [key for key in _REQUIRED if key not in entry]
    unknown = sorted(set(entry) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        raise ConfigError(f"{where} lacks {missing} and has unknown {unknown}: use {_REQUIRED}")
    name, kind = entry["name"], entry["kind"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} has name={name!r}: give a non-empty string")
    if kind not in get_args(Kind):
        raise ConfigError(f"parameter {name!r} has kind={kind!r}: use one of {get_args(Kind)}")
    sharded, tied = entry.get("sharded", kind in _SHARDED), entry.get("tied")
    if not isinstance(sharded, bool) or not isinstance(tied, str | None):
        raise ConfigError(
            f"parameter {name!r} has sharded={sharded!r}, tied={tied!r}: "
            "give a boolean and a string"
        )
    return ModelParam(
        name=name,
        shape=_shape(entry["shape"], kind, name),
        kind=kind,
        sharded=sharded,
        layer=layer_of(name),
        expert=expert_of(name) if kind.startswith("expert") else None,
        tied=tied,
    )


def _shape(shape: Any, kind: str, name: str) -> tuple[int, ...]:
    low, high = _NUM_DIMS[kind]
    if (
        not isinstance(shape, list)
        or not low <= len(shape) <= high
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise ConfigError(
            f"parameter {name!r} of kind {kind} has shape={shape!r}: give {low} to {high} positive "
            "integers"
        )
    return tuple(shape)
