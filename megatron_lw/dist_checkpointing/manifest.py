"""What a checkpoint holds and where: the records of `manifest.json`.

The manifest is the checkpoint: data files without one are leftovers of a save that never ended. It
names every piece with its file and place, declares the padding of every row, carries everything
that is not a tensor, and a checksum of itself. `docs/checkpoint-format.md` specifies the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from megatron_lw.dist_checkpointing.values import Encoded
from megatron_lw.optimizer.boxes import Box

FORMAT_VERSION = 1
CHUNK_NBYTES = 4 << 20
"""Every chunk of this many bytes of a data file has a checksum of its own."""
MASTER = "master"
"""State key of the fp32 master of a stepped parameter; its weight is the master, cast."""
VALUE = "value"
"""State key of what is not stepped: frozen parameters, persistent buffers, tensors of `extra`."""
HISTORY = "amax_history"
"""State key of the maxima that the delayed scale of an FP8 weight follows from."""


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """XXH3 of 64 bits of the parts one after another: 16 hexadecimal digits, the highest first.

    Faster than memory is read, so that checksums cost a save nothing that counts; the algorithm is
    that of the xxHash specification.
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a logical tensor, contiguous in one data file.

    Attributes:
        box: the part of the logical tensor, stored in row-major order.
        file: index into `Manifest.files`.
        offset: first byte in the file.
    """

    box: Box
    file: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A logical tensor; its pieces tile it exactly.

    Attributes:
        name: identity of the parameter (`ParamRecord.name`), or the name of a buffer, a frozen
            parameter or a tensor of `extra`.
        state: `MASTER`, `VALUE`, `HISTORY` or a state key of the child.
        dtype: torch dtype without its module, such as "float32".
        shape: logical shape, without padding of any kind.
        pieces: its parts, in the order of their boxes' starts.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> str:
        """What messages, the command line and the data files call it."""
        return f"{self.name}/{self.state}"

    @property
    def numel(self) -> int:
        """Logical elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRecord:
    """What is known of a stepped parameter, enough to plan another layout of ranks from.

    Attributes:
        name: identity: the global name, or `tied/NAME` for a weight with several copies.
        names: global names of its copies; one for most.
        dtype: dtype of the weight in the model.
        shape: logical shape of the whole parameter.
        stored_rows: rows of the whole parameter as stored; more than `shape[0]` where it is padded
            inside.
        child: the child optimizer that steps it.
        group: its parameter group.
        domain: dense, expert or replicated.
        tp_dim: dimension that tensor parallelism may divide.
        blocks: rows of the fused matrices inside the whole parameter, each divided by itself.
        split_blocks: whether these are matrices of their own.
        qkv: rows of query, (gate,) key and value in each query group, where these are matrices.
        matrices: matrices stacked in the whole parameter; None: it is no stack.
        is_stack: whether its first dimension is divided over expert parallelism.
        role: matrix, vector, embedding or output.
    """

    name: str
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    stored_rows: int | None
    child: str
    group: str
    domain: str
    tp_dim: int | None
    blocks: tuple[int, ...] | None
    split_blocks: bool
    qkv: tuple[int, ...] | None
    matrices: int | None
    is_stack: bool
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements of one parameter that lie in a row.

    Attributes:
        name: identity of the parameter.
        start: first element in the row.
        numel: elements.
    """

    name: str
    start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """What one rank's row of a bucket holds; runs and padding tile it exactly.

    Attributes:
        bucket: name of the bucket, unique over the run: domain, child, stage and first parameter.
        rank: the global rank that holds the row.
        length: elements.
        runs: logical elements, ascending.
        padding: (start, stop) of declared padding, ascending: behind parameters, at the end of the
            row, and padding rows inside parameters.
    """

    bucket: str
    rank: int
    length: int
    runs: tuple[Run, ...]
    padding: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A data file.

    Attributes:
        name: file name in the checkpoint's directory; made from its content.
        rank: the global rank that wrote it.
        nbytes: its size.
        checksums: `checksum` of each chunk of `CHUNK_NBYTES` bytes, the last one shorter.
    """

    name: str
    rank: int
    nbytes: int
    checksums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """What a child optimizer holds besides tensors.

    Attributes:
        num_steps: steps it has taken.
        state_keys: its per-element states.
        backend: its kernel, for the record; None where there is no choice.
        values: parameter -> plain values of its state, such as a step count of its own.
    """

    num_steps: int
    state_keys: tuple[str, ...]
    backend: str | None = None
    values: Mapping[str, Encoded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: the caller's number of it.
        topology: name of a process group -> its size.
        params: stepped parameters, in natural order of their names.
        tensors: logical tensors, in natural order of name, then by state.
        rows: every row of every rank.
        files: the data files.
        children: child name -> what it holds.
        groups: parameter-group name -> its settings.
        values: other values by name: `loss_scaler`, `scheduler`, `extra`.
        values_by_rank: for each rank the values of `extra` that differ between ranks.
    """

    step: int
    topology: Mapping[str, int]
    params: tuple[ParamRecord, ...]
    tensors: tuple[TensorRecord, ...]
    rows: tuple[RowRecord, ...]
    files: tuple[FileRecord, ...]
    children: Mapping[str, ChildRecord]
    groups: Mapping[str, Encoded]
    values: Mapping[str, Encoded]
    values_by_rank: tuple[Mapping[str, Encoded], ...]
