"""Which saved bytes go where: boxes that are asked for against boxes that were saved.

`find_reads` is arithmetic on records. `carry_out` reads, in strips of a few MiB where bytes cannot
go straight to their place, and checks every chunk of a file that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.manifest import Manifest, TensorRecord
from megatron_lw.dist_checkpointing.runs import intersect
from megatron_lw.dist_checkpointing.storage import Storage
from megatron_lw.dist_checkpointing.verified_file import VerifiedFile, contents_of
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box

STRIP_NBYTES = 4 << 20
"""Bytes that are read at once where they cannot go straight into their tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """A part of a saved piece, and the tensor that it fills.

    Attributes:
        file: index into `Manifest.files`.
        offset: first byte of the piece in the file.
        piece: shape of the piece.
        part: the part of the piece that is read.
        dtype: dtype of the saved elements.
        target: of shape `part.shape`; any dtype, device and strides; written.
    """

    file: int
    offset: int
    piece: tuple[int, ...]
    part: Box
    dtype: torch.dtype
    target: torch.Tensor


def find_reads(
    record: TensorRecord, shape: tuple[int, ...], box: Box, target: torch.Tensor
) -> list[Read]:
    """Find what fills a box of a logical tensor.

    Args:
        record: what was saved.
        shape: logical shape of the tensor that is asked for.
        box: the part that is asked for.
        target: of shape `box.shape`.

    Raises:
        CheckpointError: the logical shapes differ, or not all that is asked for was saved.
    """
    if record.shape != shape:
        raise CheckpointError(
            f"{record.key} has the logical shape {list(shape)}, but {list(record.shape)} in the "
            "checkpoint; load into the model that was saved, or leave it out"
        )
    reads = []
    found = 0
    for piece in record.pieces:
        common = intersect(piece.box, box)
        if common is None:
            continue
        within = zip(common.start, common.shape, box.start, strict=True)
        reads.append(
            Read(
                file=piece.file,
                offset=piece.offset,
                piece=piece.box.shape,
                part=Box(_relative(common, piece.box), common.shape),
                dtype=dtype_of(record.dtype, record.key),
                target=target[tuple(slice(at - o, at - o + n) for at, n, o in within)],
            )
        )
        found += math.prod(common.shape)
    if found != math.prod(box.shape):
        raise CheckpointError(
            f"{record.key}: {math.prod(box.shape)} elements of shape {list(box.shape)} at "
            f"{list(box.start)} are asked for, but only {found} of them were saved"
        )
    return reads


def carry_out(reads: Iterable[Read], manifest: Manifest, directory: Path, storage: Storage) -> None:
    """Carry reads out, file by file, in the order in which they lie.

    Raises:
        CheckpointError: a file is missing, too short, or a chunk is not what was written.
    """
    ordered = sorted(reads, key=lambda read: (read.file, read.offset, read.part.start))
    for index, of_file in groupby(ordered, key=lambda read: read.file):
        contents = contents_of(manifest, index)
        with VerifiedFile(storage, directory, manifest.files[index], contents) as file:
            for read in of_file:
                _region(file, read.offset, read.piece, read.part, read.dtype, read.target)


@torch.no_grad()
def _region(
    file: VerifiedFile,
    offset: int,
    shape: tuple[int, ...],
    part: Box,
    dtype: torch.dtype,
    target: torch.Tensor,
) -> None:
    """Read a part of a row-major array that lies at `offset`, in strips of whole rows."""
    itemsize = dtype.itemsize
    if part.shape == shape and target.dtype == dtype and _takes_bytes(target):
        file.read_into(offset, target)
        return
    if not shape:
        target.copy_(_strip(file, offset, 1, dtype).view(()))
        return
    inner = math.prod(shape[1:])
    if inner * itemsize > STRIP_NBYTES:
        below = Box(part.start[1:], part.shape[1:])
        for row in range(part.shape[0]):
            at = offset + (part.start[0] + row) * inner * itemsize
            _region(file, at, shape[1:], below, dtype, target[row])
        return
    rows = max(1, STRIP_NBYTES // max(1, inner * itemsize))
    columns = tuple(slice(at, at + n) for at, n in zip(part.start[1:], part.shape[1:], strict=True))
    for first in range(0, part.shape[0], rows):
        count = min(rows, part.shape[0] - first)
        at = offset + (part.start[0] + first) * inner * itemsize
        strip = _strip(file, at, count * inner, dtype).view(count, *shape[1:])
        target[first : first + count].copy_(strip[(slice(None), *columns)])


def _strip(file: VerifiedFile, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
    file.read_into(offset, raw)
    return raw.view(dtype)


def _takes_bytes(target: torch.Tensor) -> bool:
    """Whether bytes of a file can go straight into a tensor."""
    return target.device.type == "cpu" and target.is_contiguous() and target.numel() > 0


def _relative(box: Box, to: Box) -> tuple[int, ...]:
    return tuple(at - origin for at, origin in zip(box.start, to.start, strict=True))
