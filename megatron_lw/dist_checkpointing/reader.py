"""A committed checkpoint, open for reading without a process group.

Nothing here knows how the ranks of the run were laid out: what is asked for is found by its box.
Every chunk of a file that is touched is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megatron_lw.dist_checkpointing.directory import read_manifest, resolve
from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.manifest import VALUE, TensorRecord
from megatron_lw.dist_checkpointing.reading import carry_out, find_reads
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage
from megatron_lw.dist_checkpointing.values import Encoded, decode
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box


class CheckpointReader:
    """Reads boxes of logical tensors, and values.

    Args:
        path: a root (its newest committed checkpoint is read) or a checkpoint's directory.
        storage: how files are read; the file system if None.

    Attributes:
        directory: of the checkpoint.
        manifest: what it holds; its pieces tile their tensors.
        storage: how files are read.

    Raises:
        CheckpointError: nothing committed is there, or its manifest is not whole.
    """

    def __init__(self, path: str | PathLike[str], storage: Storage | None = None) -> None:
        self.storage = FileStorage() if storage is None else storage
        self.directory = resolve(Path(path), self.storage)
        self.manifest = read_manifest(self.directory, self.storage)
        self._values: Mapping[str, TensorRecord] = {
            record.name: record for record in self.manifest.tensors if record.state == VALUE
        }

    def read(self, record: TensorRecord, box: Box, out: torch.Tensor) -> None:
        """Read a box of a logical tensor, whatever pieces it lies in.

        Args:
            record: the tensor.
            box: inside its logical shape.
            out: of shape `box.shape`, any dtype and device; values are cast as `copy_` does.

        Raises:
            CheckpointError: a file is missing or too short, or a chunk is not what was written.
        """
        reads = find_reads(record, record.shape, box, out)
        carry_out(reads, self.manifest, self.directory, self.storage)

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """A whole logical tensor.

        Raises:
            CheckpointError: see `read`.
        """
        out = torch.empty(record.shape, dtype=dtype_of(record.dtype, record.key))
        self.read(record, Box((0,) * len(record.shape), record.shape), out)
        return out

    def value(self, encoded: Encoded, where: str = "value") -> Any:
        """A value that was saved, with the tensors inside it.

        Args:
            encoded: from the manifest.
            where: what messages call it.

        Raises:
            CheckpointError: it is no encoding of a value, or see `read`.
        """

        def take(name: str) -> torch.Tensor:
            if name not in self._values:
                raise CheckpointError(f"{where}: refers to the tensor {name!r}, which is not there")
            return self.tensor(self._values[name])

        return decode(encoded, take=take, where=where)


def blocks(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Divide a tensor into boxes of at most `most` elements, in row-major order.

    Each is contiguous in the tensor and follows the one before it.

    Args:
        shape: of the tensor.
        most: at least 1.
    """
    if math.prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for index in range(shape[0]):
            for box in blocks(shape[1:], most):
                yield Box((index, *box.start), (1, *box.shape))
        return
    step = most // inner
    for low in range(0, shape[0], step):
        start = (low, *(0 for _ in shape[1:]))
        yield Box(start, (min(step, shape[0] - low), *shape[1:]))
