"""Headers of data files, in the safetensors format.

A file is eight bytes with the length of the header, the header, and the tensors' bytes without a
gap. The header is JSON, and here a pure function of what the file holds: a reader who knows the
manifest knows every byte of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lw.dist_checkpointing.dtypes import CODES, dtype_of
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.errors import CheckpointError

ALIGNMENT = 64
"""The first tensor starts at a multiple of this; spaces fill the header up, as the format allows.
"""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in a data file: a piece of a logical tensor.

    Attributes:
        key: `TensorRecord.key` of the logical tensor.
        start: first index of the piece in it, in each dimension.
        shape: shape of the piece.
        dtype: its dtype.
    """

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name in the header, such as "layers.0.weight/master@8,0"."""
        return f"{self.key}@{','.join(map(str, self.start))}"

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(entries: Sequence[HeaderEntry]) -> bytes:
    """The first bytes of a file that holds these tensors, in this order.

    Source: the safetensors format (https://github.com/huggingface/safetensors, README).
    """
    described: dict[str, dict[str, object]] = {}
    offset = 0
    for entry in entries:
        described[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (offset, offset + entry.nbytes),
        }
        offset += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def placed(manifest: Manifest) -> list[list[tuple[int, HeaderEntry]]]:
    """For each data file of a checkpoint the first byte and the entry of its pieces, by place.

    Raises:
        CheckpointError: a piece's file is none of the manifest's, or its dtype is unknown.
    """
    found: list[list[tuple[int, HeaderEntry]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        dtype = dtype_of(tensor.dtype, tensor.key)
        for piece in tensor.pieces:
            if not 0 <= piece.file < len(found):
                raise CheckpointError(
                    f"{tensor.key}: file {piece.file} is none of the {len(found)} data files"
                )
            entry = HeaderEntry(tensor.key, piece.box.start, piece.box.shape, dtype)
            found[piece.file].append((piece.offset, entry))
    for each in found:
        each.sort(key=lambda place: (place[0], place[1].nbytes, place[1].name))
    return found


def file_order(entries: Sequence[HeaderEntry]) -> list[int]:
    """In which order a file holds tensors: empty ones first, then larger elements before smaller.

    So each tensor is aligned to its elements, as readers that map files into memory need it, and
    offsets alone determine the order. Otherwise the order is the given one.
    """

    def key(index: int) -> tuple[bool, int, str]:
        entry = entries[index]
        return (True, -entry.dtype.itemsize, "") if entry.nbytes else (False, 0, entry.name)

    return sorted(range(len(entries)), key=key)
