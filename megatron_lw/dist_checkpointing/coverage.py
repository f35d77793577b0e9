"""The contract of a checkpoint, checked on its manifest alone: everything once, nothing undeclared.

Pieces tile their tensors; runs and declared padding tile their rows; header and pieces tile their
files; and what refers to something by name finds it. It is checked before a checkpoint is committed
and again whenever one is read, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, islice

from megatron_lw.dist_checkpointing.data_file import file_name
from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.headers import HeaderEntry, header, placed
from megatron_lw.dist_checkpointing.manifest import (
    CHUNK_NBYTES,
    MASTER,
    VALUE,
    FileRecord,
    Manifest,
    RowRecord,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.tiling import tiling_problem
from megatron_lw.dist_checkpointing.values import Encoded, tensor_names
from megatron_lw.errors import CheckpointError

_NAMED = 10


def check_manifest(manifest: Manifest) -> None:
    """Raise unless a manifest keeps the contract.

    Raises:
        CheckpointError: names the first ten problems.
    """
    found = list(islice(problems(manifest), _NAMED + 1))
    if found:
        more = "; and more" if len(found) > _NAMED else ""
        raise CheckpointError(
            f"the manifest of step {manifest.step} is inconsistent: "
            + "; ".join(found[:_NAMED])
            + more
        )


def problems(manifest: Manifest) -> Iterator[str]:
    """What is wrong with a manifest, one by one, each by name."""
    return chain(
        _tensors(manifest),
        _params(manifest),
        _children(manifest),
        _rows(manifest),
        _files(manifest),
        _values(manifest),
    )


def encoded_values(manifest: Manifest) -> Iterator[tuple[str, Encoded]]:
    """All values of a manifest that are encoded, with what messages call each."""
    for child, record in manifest.children.items():
        for name, value in record.values.items():
            yield f"value of {name} in child {child}", value
    for name, value in manifest.groups.items():
        yield f"parameter group {name}", value
    for name, value in manifest.values.items():
        yield name, value
    for rank, values in enumerate(manifest.values_by_rank):
        for name, value in values.items():
            yield f"{name} of rank {rank}", value


def _repeated(what: str, names: Iterable[Hashable]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {name!r} is there {count} times"


def _tensors(manifest: Manifest) -> Iterator[str]:
    yield from _repeated("tensor", (tensor.key for tensor in manifest.tensors))
    stepped = {param.name for param in manifest.params}
    for tensor in manifest.tensors:
        problem = tiling_problem(tensor.shape, [piece.box for piece in tensor.pieces])
        if problem is not None:
            yield f"tensor {tensor.key!r} of shape {tensor.shape}: {problem}"
        yield from _dtype(tensor)
        if (tensor.state == VALUE) == (tensor.name in stepped):
            kind = "a stepped parameter" if tensor.name in stepped else "no stepped parameter"
            yield f"tensor {tensor.key!r} is of {kind}, which has no state of that name"


def _dtype(tensor: TensorRecord) -> Iterator[str]:
    try:
        dtype_of(tensor.dtype, f"tensor {tensor.key!r}")
    except CheckpointError as error:
        yield str(error)


def _params(manifest: Manifest) -> Iterator[str]:
    yield from _repeated("parameter", (param.name for param in manifest.params))
    yield from _repeated("the name", (name for param in manifest.params for name in param.names))
    shapes = {(tensor.name, tensor.state): tensor.shape for tensor in manifest.tensors}
    for param in manifest.params:
        if param.group not in manifest.groups:
            yield f"parameter {param.name!r}: its group {param.group!r} is not there"
        child = manifest.children.get(param.child)
        if child is None:
            yield f"parameter {param.name!r}: its child {param.child!r} is not there"
        for state in (MASTER, *(child.state_keys if child is not None else ())):
            shape = shapes.get((param.name, state))
            if shape is None:
                yield f"parameter {param.name!r} has no {state!r}"
            elif shape != param.shape:
                yield f"tensor '{param.name}/{state}' has shape {shape}, not {param.shape}"


def _children(manifest: Manifest) -> Iterator[str]:
    steps = {param.name: param.child for param in manifest.params}
    for name, child in manifest.children.items():
        for param in child.values:
            if steps.get(param) != name:
                yield f"child {name!r} has values for {param!r}, which it does not step"


def _rows(manifest: Manifest) -> Iterator[str]:
    yield from _repeated("row", ((row.bucket, row.rank) for row in manifest.rows))
    numel = {param.name: 0 for param in manifest.params}
    for row in manifest.rows:
        yield from _row(row)
        for run in row.runs:
            if run.name in numel:
                numel[run.name] += run.numel
            else:
                yield f"row {row.rank} of bucket {row.bucket!r} holds unknown {run.name!r}"
    by_key = {tensor.key: tensor.numel for tensor in manifest.tensors}
    for name, total in numel.items():
        size = by_key.get(f"{name}/{MASTER}", 0)
        if size and (total == 0 or total % size):
            yield f"parameter {name!r} has {size} elements, but rows hold {total}, no whole copies"


def _row(row: RowRecord) -> Iterator[str]:
    where = f"row {row.rank} of bucket {row.bucket!r}"
    parts = [(run.start, run.start + run.numel, run.name) for run in row.runs]
    parts += [(start, stop, "padding") for start, stop in row.padding]
    end = 0
    for start, stop, name in sorted(parts):
        if stop <= start:
            yield f"{where}: {name} from {start} to {stop} is empty"
        if start != end:
            what = "in nothing" if start > end else "in two"
            yield f"{where}: elements {min(start, end)} to {max(start, end)} are {what} at {name}"
        end = max(end, stop)
    if end != row.length:
        yield f"{where}: runs and padding end at {end}, the row at {row.length}"


def _files(manifest: Manifest) -> Iterator[str]:
    yield from _repeated("file", (file.name for file in manifest.files))
    try:
        contents = placed(manifest)
    except CheckpointError as error:
        yield str(error)
        return
    for file, content in zip(manifest.files, contents, strict=True):
        if len(file.checksums) != -(-file.nbytes // CHUNK_NBYTES):
            yield f"file {file.name!r}: {len(file.checksums)} checksums for {file.nbytes} bytes"
        elif file.name != file_name(file.rank, file.nbytes, file.checksums):
            yield f"file {file.name!r}: the name does not fit rank, size and checksums"
        yield from _file(file, content)


def _file(file: FileRecord, content: list[tuple[int, HeaderEntry]]) -> Iterator[str]:
    """Header and pieces follow each other without a gap, to the end."""
    end = len(header([entry for _, entry in content]))
    for offset, entry in content:
        if offset != end:
            what = "belong to nothing" if offset > end else "belong to two"
            yield (
                f"file {file.name!r}: bytes {min(offset, end)} to {max(offset, end)} {what}, "
                f"at {entry.name!r}"
            )
        end = max(end, offset + entry.nbytes)
    if end != file.nbytes:
        yield f"file {file.name!r}: its pieces end at byte {end}, the file at {file.nbytes}"


def _values(manifest: Manifest) -> Iterator[str]:
    known = {tensor.name for tensor in manifest.tensors if tensor.state == VALUE}
    for where, value in encoded_values(manifest):
        for name in tensor_names(value):
            if name not in known:
                yield f"{where} holds tensor {name!r}, which is not there"
