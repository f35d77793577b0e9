"""`Manifest` as the bytes of `manifest.json`, and back.

The file is one line of JSON: format, version, SHA-256 of the body, body. Everything outside the
body is fixed to the byte and the body is what the checksum covers, so no bit can change unseen.
Reading takes nothing on trust: whatever a file holds, it gives a manifest or a `CheckpointError`.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.json_fields import (
    Fields,
    boolean,
    count,
    encoded,
    items,
    mapping_of,
    optional,
    parse,
    shape,
    text,
    tuple_of,
)
from megatron_lw.dist_checkpointing.manifest import (
    FORMAT_VERSION,
    ChildRecord,
    FileRecord,
    Manifest,
    ParamRecord,
    Piece,
    RowRecord,
    Run,
    TensorRecord,
)
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box

FORMAT = "megatron_lw checkpoint"
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
DATA_FILE = re.compile(r"rank\d{5,9}-[0-9a-f]{16}\.safetensors")
"""Names of data files; nothing else is ever opened."""

_HEAD = f'{{"format":"{FORMAT}","version":{FORMAT_VERSION},"sha256":"'.encode()
_MIDDLE = b'","manifest":'
_TAIL = b"}\n"
_ANY_HEAD = re.compile(rb'\{"format":"([^"]{0,80})","version":(\d{1,9}),')


def to_bytes(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`; equal manifests give equal bytes."""
    body = json.dumps(_body(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False)
    raw = body.encode("ascii")
    return _HEAD + hashlib.sha256(raw).hexdigest().encode() + _MIDDLE + raw + _TAIL


def from_bytes(data: bytes, where: str) -> Manifest:
    """Read a manifest.

    Args:
        data: the bytes of `manifest.json`.
        where: its path, for messages.

    Raises:
        CheckpointError: it is no manifest, of another version, or any bit of it has changed.
    """
    body = _checked_body(data, where)
    return _manifest(Fields(parse(body, where), where))


def _checked_body(data: bytes, where: str) -> bytes:
    """The body, once everything round it is right and its checksum too."""
    found = _ANY_HEAD.match(data)
    if found is None or found[1].decode("latin-1") != FORMAT:
        raise CheckpointError(f"{where}: not the manifest of a checkpoint; it begins {data[:40]!r}")
    if int(found[2]) != FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format version {int(found[2])}, but this library reads {FORMAT_VERSION}; "
            "use the version of megatron_lw that wrote it"
        )
    start = len(_HEAD) + 64 + len(_MIDDLE)
    body = data[start : -len(_TAIL)]
    digest = hashlib.sha256(body).hexdigest().encode()
    if data != _HEAD + digest + _MIDDLE + body + _TAIL:
        raise CheckpointError(f"{where}: damaged: it does not fit its own SHA-256")
    return body


def _body(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "topology": dict(manifest.topology),
        "params": [_param_body(param) for param in manifest.params],
        "tensors": [_tensor_body(tensor) for tensor in manifest.tensors],
        "rows": [_row_body(row) for row in manifest.rows],
        "files": [_file_body(file) for file in manifest.files],
        "children": {name: _child_body(child) for name, child in manifest.children.items()},
        "groups": dict(manifest.groups),
        "values": dict(manifest.values),
        "values_by_rank": [dict(values) for values in manifest.values_by_rank],
    }


def _param_body(param: ParamRecord) -> dict[str, Any]:
    return {
        "name": param.name,
        "names": param.names,
        "dtype": param.dtype,
        "shape": param.shape,
        "stored_rows": param.stored_rows,
        "child": param.child,
        "group": param.group,
        "domain": param.domain,
        "tp_dim": param.tp_dim,
        "blocks": param.blocks,
        "split_blocks": param.split_blocks,
        "qkv": param.qkv,
        "matrices": param.matrices,
        "is_stack": param.is_stack,
        "role": param.role,
    }


def _tensor_body(tensor: TensorRecord) -> dict[str, Any]:
    pieces = [[p.box.start, p.box.shape, p.file, p.offset] for p in tensor.pieces]
    return {
        "name": tensor.name,
        "state": tensor.state,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "pieces": pieces,
    }


def _row_body(row: RowRecord) -> dict[str, Any]:
    return {
        "bucket": row.bucket,
        "rank": row.rank,
        "length": row.length,
        "runs": [[run.name, run.start, run.numel] for run in row.runs],
        "padding": row.padding,
    }


def _file_body(file: FileRecord) -> dict[str, Any]:
    return {
        "name": file.name,
        "rank": file.rank,
        "nbytes": file.nbytes,
        "checksums": file.checksums,
    }


def _child_body(child: ChildRecord) -> dict[str, Any]:
    return {
        "num_steps": child.num_steps,
        "state_keys": child.state_keys,
        "backend": child.backend,
        "values": dict(child.values),
    }


def _manifest(fields: Fields) -> Manifest:
    manifest = Manifest(
        step=fields.take("step", count),
        topology=fields.take("topology", mapping_of(count)),
        params=fields.take("params", tuple_of(_param)),
        tensors=fields.take("tensors", tuple_of(_tensor)),
        rows=fields.take("rows", tuple_of(_row)),
        files=fields.take("files", tuple_of(_file)),
        children=fields.take("children", mapping_of(_child)),
        groups=fields.take("groups", mapping_of(encoded)),
        values=fields.take("values", mapping_of(encoded)),
        values_by_rank=fields.take("values_by_rank", tuple_of(mapping_of(encoded))),
    )
    fields.end()
    return manifest


def _param(value: object, where: str) -> ParamRecord:
    fields = Fields(value, where)
    record = ParamRecord(
        name=fields.take("name", text),
        names=fields.take("names", tuple_of(text)),
        dtype=fields.take("dtype", _dtype),
        shape=fields.take("shape", shape),
        stored_rows=fields.take("stored_rows", optional(count)),
        child=fields.take("child", text),
        group=fields.take("group", text),
        domain=fields.take("domain", text),
        tp_dim=fields.take("tp_dim", optional(count)),
        blocks=fields.take("blocks", optional(tuple_of(count))),
        split_blocks=fields.take("split_blocks", boolean),
        qkv=fields.take("qkv", optional(tuple_of(count))),
        matrices=fields.take("matrices", optional(count)),
        is_stack=fields.take("is_stack", boolean),
        role=fields.take("role", text),
    )
    fields.end()
    return record


def _tensor(value: object, where: str) -> TensorRecord:
    fields = Fields(value, where)
    record = TensorRecord(
        name=fields.take("name", text),
        state=fields.take("state", text),
        dtype=fields.take("dtype", _dtype),
        shape=fields.take("shape", shape),
        pieces=fields.take("pieces", tuple_of(_piece)),
    )
    fields.end()
    return record


def _piece(value: object, where: str) -> Piece:
    start, extents, file, offset = items(value, 4, where)
    box = Box(tuple_of(count)(start, where), shape(extents, where))
    return Piece(box=box, file=count(file, where), offset=count(offset, where))


def _row(value: object, where: str) -> RowRecord:
    fields = Fields(value, where)
    record = RowRecord(
        bucket=fields.take("bucket", text),
        rank=fields.take("rank", count),
        length=fields.take("length", count),
        runs=fields.take("runs", tuple_of(_run)),
        padding=fields.take("padding", tuple_of(_span)),
    )
    fields.end()
    return record


def _run(value: object, where: str) -> Run:
    name, start, numel = items(value, 3, where)
    return Run(name=text(name, where), start=count(start, where), numel=count(numel, where))


def _span(value: object, where: str) -> tuple[int, int]:
    start, stop = items(value, 2, where)
    return count(start, where), count(stop, where)


def _file(value: object, where: str) -> FileRecord:
    fields = Fields(value, where)
    record = FileRecord(
        name=fields.take("name", _file_name),
        rank=fields.take("rank", count),
        nbytes=fields.take("nbytes", count),
        checksums=fields.take("checksums", tuple_of(_checksum)),
    )
    fields.end()
    return record


def _child(value: object, where: str) -> ChildRecord:
    fields = Fields(value, where)
    record = ChildRecord(
        num_steps=fields.take("num_steps", count),
        state_keys=fields.take("state_keys", tuple_of(text)),
        backend=fields.take("backend", optional(text)),
        values=fields.take("values", mapping_of(encoded)),
    )
    fields.end()
    return record


def _checksum(value: object, where: str) -> str:
    found = text(value, where)
    if _CHECKSUM.fullmatch(found) is None:
        raise CheckpointError(f"{where}: {found!r} is no XXH3 of 16 hexadecimal digits")
    return found


def _file_name(value: object, where: str) -> str:
    name = text(value, where)
    if DATA_FILE.fullmatch(name) is None:
        raise CheckpointError(f"{where}: {name!r} is no name of a data file")
    return name


def _dtype(value: object, where: str) -> str:
    name = text(value, where)
    dtype_of(name, where)
    return name
