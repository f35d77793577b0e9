"""From what each rank has written to one manifest. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_lw.dist_checkpointing.manifest import (
    ChildRecord,
    FileRecord,
    Manifest,
    ParamRecord,
    Piece,
    RowRecord,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.values import Encoded
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box
from megatron_lw.optimizer.names import natural_key

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPiece:
    """A piece in the file of the rank that wrote it.

    Attributes:
        name: see `TensorRecord`.
        state: see `TensorRecord`.
        dtype: see `TensorRecord`.
        shape: see `TensorRecord`.
        box: the part of the logical tensor.
        offset: first byte in the rank's file.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank contributes to the manifest.

    Attributes:
        rank: its global rank.
        step: the caller's number of the checkpoint.
        topology: name of a process group -> its size; its own groups may be smaller than others'.
        params: its stepped parameters.
        pieces: what it wrote.
        rows: its rows.
        file: its data file; None if it wrote nothing.
        children: child name -> what it holds besides tensors.
        groups: parameter-group name -> settings.
        values: values that must be equal on all ranks.
        extra: the caller's extra values, by key.
    """

    rank: int
    step: int
    topology: Mapping[str, int]
    params: tuple[ParamRecord, ...]
    pieces: tuple[WrittenPiece, ...]
    rows: tuple[RowRecord, ...]
    file: FileRecord | None
    children: Mapping[str, ChildRecord]
    groups: Mapping[str, Encoded]
    values: Mapping[str, Encoded]
    extra: Mapping[str, Encoded]


def merge(parts: Sequence[RankPart]) -> Manifest:
    """One manifest from the parts of all ranks, in rank order.

    Raises:
        CheckpointError: ranks disagree about something that they must share; it is named.
    """
    names = dict.fromkeys(name for part in parts for name in part.values)
    shared: dict[str, list[object]] = {
        "step": [part.step for part in parts],
        "names of parameter groups": [sorted(part.groups) for part in parts],
        **{
            f"settings of parameter group {name!r}": [part.groups.get(name) for part in parts]
            for name in parts[0].groups
        },
        **{name: [part.values.get(name) for part in parts] for name in names},
    }
    for what, values in shared.items():
        _require_equal(what, [part.rank for part in parts], values)
    files = [part.file for part in parts if part.file is not None]
    extra, by_rank = _divide_extra([part.extra for part in parts])
    return Manifest(
        step=parts[0].step,
        topology={name: max(part.topology[name] for part in parts) for name in parts[0].topology},
        params=_merge_params(parts),
        tensors=_merge_tensors(parts),
        rows=tuple(row for part in parts for row in part.rows),
        files=tuple(files),
        children=_merge_children(parts),
        groups=parts[0].groups,
        values={**parts[0].values, "extra": extra},
        values_by_rank=by_rank,
    )


def _merge_params(parts: Sequence[RankPart]) -> tuple[ParamRecord, ...]:
    found: dict[str, ParamRecord] = {}
    for part in parts:
        for record in part.params:
            known = found.setdefault(record.name, record)
            names = tuple(sorted({*known.names, *record.names}, key=natural_key))
            if replace(known, names=names) != replace(record, names=names):
                raise CheckpointError(
                    f"parameter {record.name!r} is {record} on rank {part.rank}, but {known} on a "
                    "rank before it; copies and parts of one parameter must have the same facts"
                )
            found[record.name] = replace(known, names=names)
    return _natural(found.values(), lambda record: record.name)


def _merge_tensors(parts: Sequence[RankPart]) -> tuple[TensorRecord, ...]:
    pieces: dict[tuple[str, str], list[Piece]] = {}
    facts: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    file = -1
    for part in parts:
        file += part.file is not None
        for piece in part.pieces:
            key = (piece.name, piece.state)
            fact = (piece.dtype, piece.shape)
            if facts.setdefault(key, fact) != fact:
                raise CheckpointError(
                    f"{piece.name}/{piece.state} is {fact} on rank {part.rank}, but {facts[key]} "
                    "on a rank before it; parts of one tensor have one dtype and logical shape"
                )
            pieces.setdefault(key, []).append(Piece(box=piece.box, file=file, offset=piece.offset))
    records = [
        TensorRecord(
            name=name,
            state=state,
            dtype=facts[name, state][0],
            shape=facts[name, state][1],
            pieces=tuple(sorted(found, key=lambda piece: piece.box.start)),
        )
        for (name, state), found in sorted(pieces.items(), key=lambda item: item[0][1])
    ]
    return _natural(records, lambda record: record.name)


def _merge_children(parts: Sequence[RankPart]) -> dict[str, ChildRecord]:
    """Children by name; what each rank owns of their values is put together."""
    found: dict[str, ChildRecord] = {}
    for part in parts:
        for name, record in part.children.items():
            known = found.setdefault(name, record)
            values = {**known.values, **record.values}
            if replace(known, values=values) != replace(record, values=values):
                raise CheckpointError(
                    f"child {name!r} of rank {part.rank} has taken {record.num_steps} steps and "
                    f"has states {record.state_keys} (kernel {record.backend}); on a rank before "
                    f"it: {known.num_steps}, {known.state_keys}, {known.backend}"
                )
            found[name] = replace(known, values=values)
    return found


def _divide_extra(
    extras: Sequence[Mapping[str, Encoded]],
) -> tuple[dict[str, Encoded], tuple[dict[str, Encoded], ...]]:
    """Values that are equal on all ranks, and for each rank its others."""
    shared = {
        key: value
        for key, value in extras[0].items()
        if all(key in other and repr(other[key]) == repr(value) for other in extras)
    }
    rest = tuple(
        {key: value for key, value in extra.items() if key not in shared} for extra in extras
    )
    return shared, rest if any(rest) else ()


def _require_equal(what: str, ranks: Sequence[int], values: Sequence[object]) -> None:
    for rank, value in zip(ranks, values, strict=True):
        if repr(value) != repr(values[0]):
            raise CheckpointError(
                f"{what} of rank {rank} differ from those of rank {ranks[0]}: {value!r} against "
                f"{values[0]!r}; ranks must be saved at the same step with the same settings"
            )


def _natural(records: Iterable[T], name: Callable[[T], str]) -> tuple[T, ...]:
    """Records in natural order of their names; a stable sort."""
    return tuple(sorted(records, key=lambda record: natural_key(name(record))))
