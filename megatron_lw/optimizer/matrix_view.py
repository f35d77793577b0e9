"""Which matrices a parameter is: the one view that every stage works from.

Routing, plan, scale, tensor-parallel assembly and orthogonalisation all read the same record, so
they cannot disagree. A parameter is a stack of `count` stored matrices (mostly one). A stored
matrix divides into *units*, runs of rows with an owner each; a unit holds *parts*, the matrices
that are orthogonalised, each with a scale of its own. Rows that no part has are padding: their
update is exactly zero, and they enter neither norm nor scale.

    declared                     units                      parts of a unit
    nothing                      the matrix                 the matrix
    blocks                       one a block                the block
    blocks, split_blocks=False   all blocks together        all blocks together
    qkv (rows a query group)     the matrix                 one a projection, rows of all groups
    logical_rows                 the logical rows           the logical rows

Shapes are those of the whole parameter over tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.boxes import BoxPair, tensor_parallel_boxes
from megatron_lw.optimizer.param_info import ParamInfo
from megatron_lw.optimizer.pieces import IntArray

Shape = tuple[int, int]
_NO_PART = -1

DEPTHWISE = "depthwise convolution"
"""Why a convolution with a group for each input channel goes to the element-wise child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """Rows of a unit that form one matrix: a run of rows, or one run in each query group.

    Attributes:
        start: first row.
        length: rows of one run.
        stride: rows from the start of one run to the next.
        repeats: number of runs.
    """

    start: int
    length: int
    stride: int = 0
    repeats: int = 1

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.length * self.repeats

    def indices(self) -> IntArray:
        """[rows] the rows of the unit, in the order in which the matrix has them."""
        runs = self.start + self.stride * np.arange(self.repeats, dtype=np.int64)
        return (runs[:, None] + np.arange(self.length, dtype=np.int64)).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUnit:
    """A run of rows of a stored matrix that one rank orthogonalises.

    Attributes:
        start: first row in the stored matrix.
        rows: number of rows.
        parts: the matrices in it; rows of none get no update.
        blocks: row counts that tensor parallelism divides each by itself; None: divided as one.
    """

    start: int
    rows: int
    parts: tuple[RowSet, ...]
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """A run of a parameter's flattened local elements whose rows are of one part shape.

    Attributes:
        start: first element.
        stop: one past the last.
        shape: rows and columns of the whole part; None for rows of no part.
    """

    start: int
    stop: int
    shape: Shape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """Which matrices a parameter is.

    Attributes:
        count: stored matrices stacked in it, on one expert-parallel rank.
        rows: rows of one whole stored matrix, padding included: outputs.
        cols: its columns: inputs.
        tp_dim: dimension of a stored matrix that tensor parallelism divides; None: none.
        blocks: row counts that it divides each by itself, summing to `rows`; None: as one.
        units: what is owned, in the order of rows.
    """

    count: int
    rows: int
    cols: int
    tp_dim: int | None
    blocks: tuple[int, ...] | None
    units: tuple[MatrixUnit, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Rows and columns of each part of one stored matrix."""
        return tuple((part.rows, self.cols) for unit in self.units for part in unit.parts)

    @property
    def unused_rows(self) -> int:
        """Rows of one stored matrix that no part has."""
        return self.rows - sum(rows for rows, _ in self.shapes)

    def unit_boxes(self, unit: MatrixUnit, tp_size: int) -> tuple[tuple[BoxPair, ...], ...]:
        """For each tensor-parallel rank, which box of its local unit is which of the whole unit."""
        if self.tp_dim is None or tp_size == 1:
            return ()
        local = self.local_shape(unit.rows, tp_size)
        return tuple(
            tensor_parallel_boxes("unit", local, self.tp_dim, unit.blocks, tp_size, rank)[1]
            for rank in range(tp_size)
        )

    def local_shape(self, rows: int, tp_size: int) -> Shape:
        """What one tensor-parallel rank holds of `rows` rows."""
        if self.tp_dim == 0:
            return rows // tp_size, self.cols
        return rows, self.cols // (1 if self.tp_dim is None else tp_size)

    def local_rows(self, unit: MatrixUnit, tp_size: int, tp_rank: int) -> IntArray:
        """[local rows] which row of the whole unit each row on one tensor-parallel rank is."""
        if self.tp_dim != 0:
            return np.arange(unit.rows, dtype=np.int64)
        return _shard_rows(unit.blocks or (unit.rows,), tp_size, tp_rank)

    def local_runs(self, tp_size: int, tp_rank: int) -> tuple[LocalRun, ...]:
        """The parameter's elements on one tensor-parallel rank, by the shape of their part."""
        shapes = list(dict.fromkeys(self.shapes))
        kind = np.full(self.rows, _NO_PART, dtype=np.int64)
        for unit in self.units:
            for part in unit.parts:
                kind[unit.start + part.indices()] = shapes.index((part.rows, self.cols))
        if self.tp_dim == 0:
            kind = kind[_shard_rows(self.blocks or (self.rows,), tp_size, tp_rank)]
        kind = np.tile(kind, self.count)
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
        width = self.local_shape(self.rows, tp_size)[1]
        return tuple(
            LocalRun(
                start=first * width,
                stop=last * width,
                shape=None if kind[first] == _NO_PART else shapes[kind[first]],
            )
            for first, last in pairwise(edges)
        )


def no_matrix(info: ParamInfo) -> str | None:
    """Why a parameter is no matrix by its shape; None where it is one.

    A depthwise convolution has no two dimensions to mix: it is one only where `use_muon=True` says
    so. What has a single input channel and is of no convolution module may be one, and is taken
    for it.
    """
    shape = info.global_shape
    if 0 in shape:
        return "no elements"
    if len(shape) < 2:
        return "no matrix"
    if len(shape) > 5:
        return f"{len(shape)} dimensions"
    may_be_depthwise = len(shape) > 2 and not info.is_stack and shape[1] == 1
    if may_be_depthwise and info.depthwise is not False:
        return DEPTHWISE
    return None


def matrix_view(info: ParamInfo, *, split_qkv: bool = True, whole: bool = False) -> MatrixView:
    """Which matrices a parameter is.

    A 2-D weight is a matrix as it stands; a convolution (3-D to 5-D) is
    `[out_channels, product of the rest]`; a declared stack is a batch of matrices,
    `[N, rows, cols]` or `[N * rows, cols]`.

    Args:
        info: the parameter, of two to five dimensions.
        split_qkv: whether query, key and value are matrices of their own.
        whole: every stored matrix as it lies, fused and padded rows included, for an optimizer that
            is not Muon.

    Raises:
        ConfigError: what is declared of it does not add up, or tensor parallelism divides it into
            something else than rows or columns; names parameter, declaration and remedy.
    """
    count, rows, cols, tp_dim = _stored_matrix(info)
    used = rows if info.logical_rows is None else info.logical_rows
    if info.logical_rows is not None and (count > 1 or not 0 < used <= rows):
        raise _refusal(info, f"logical_rows = {used} of {count} matrices of {rows} rows")
    blocks = info.blocks
    if blocks is not None:
        if info.logical_rows not in (None, sum(blocks)) or sum(blocks) > rows:
            limit = "at most its" if info.logical_rows is None else "its logical_rows, of"
            raise _refusal(
                info, f"blocks {blocks} sum to {sum(blocks)}; they must sum to {limit} {used} rows"
            )
        units = _block_units(blocks, split=info.split_blocks)
        rest = rows - sum(blocks)
        blocks = (*blocks, rest) if rest else blocks
    elif info.qkv is not None:
        group = sum(info.qkv)
        if used % group:
            raise _refusal(
                info,
                f"qkv {info.qkv} are {group} rows a query group, which do not divide {used} rows",
            )
        units = (_qkv_unit(info.qkv, rows, used, split=split_qkv),)
    else:
        held = rows if tp_dim == 0 else used
        units = (MatrixUnit(start=0, rows=held, parts=(RowSet(start=0, length=used),)),)
    if whole:
        every = (RowSet(start=0, length=rows),)
        units = (MatrixUnit(start=0, rows=rows, parts=every, blocks=blocks),)
    return MatrixView(count=count, rows=rows, cols=cols, tp_dim=tp_dim, blocks=blocks, units=units)


def _stored_matrix(info: ParamInfo) -> tuple[int, int, int, int | None]:
    """Count, rows and columns of the stored matrices, and the dimension that is divided."""
    shape, tp_dim = info.global_shape, info.tp_dim
    if info.ep_size > 1:
        shape = (shape[0] // info.ep_size, *shape[1:])
    count = info.matrices or 1
    if info.is_stack and len(shape) >= 3:
        if shape[0] != count or len(shape) > 3:
            raise ConfigError(
                f"parameter {info.name!r}: matrices = {count} of a parameter of shape "
                f"{shape}; a stack is [matrices, rows, cols] or [matrices * rows, cols]"
            )
        cuts_across = tp_dim == 0
        tp_dim = None if tp_dim is None else tp_dim - 1
        shape = (shape[0] * shape[1], shape[2])
    elif info.domain == "expert" and len(shape) == 3:
        raise ConfigError(
            f"parameter {info.name!r} of an expert has shape {shape}: say how many matrices it "
            f"stacks, matrices={shape[0]} for [matrices, rows, cols]"
        )
    else:
        cuts_across = tp_dim is not None and (tp_dim > 1 or (tp_dim == 0 and count > 1))
    if cuts_across:
        raise ConfigError(
            f"parameter {info.name!r} of shape {shape} is divided along dimension {info.tp_dim}, "
            "which does not divide its matrices into rows or columns; use_muon=False sends it to "
            "the element-wise child"
        )
    return count, shape[0] // count, prod(shape[1:]), tp_dim


def _block_units(blocks: Sequence[int], *, split: bool) -> tuple[MatrixUnit, ...]:
    starts = [0, *accumulate(blocks)]
    if split:
        return tuple(
            MatrixUnit(start=start, rows=rows, parts=(RowSet(start=0, length=rows),))
            for start, rows in zip(starts, blocks, strict=False)
        )
    together = (RowSet(start=0, length=starts[-1]),)
    return (MatrixUnit(start=0, rows=starts[-1], parts=together, blocks=tuple(blocks)),)


def _qkv_unit(sizes: Sequence[int], rows: int, used: int, *, split: bool) -> MatrixUnit:
    """Megatron's layout: for each query group its rows of query, (gate,) key and value."""
    group = sum(sizes)
    if not split:
        return MatrixUnit(start=0, rows=rows, parts=(RowSet(start=0, length=used),))
    parts = tuple(
        RowSet(start=start, length=size, stride=group, repeats=used // group)
        for start, size in zip([0, *accumulate(sizes)], sizes, strict=False)
    )
    return MatrixUnit(start=0, rows=rows, parts=parts)


def _shard_rows(blocks: Sequence[int], tp_size: int, tp_rank: int) -> IntArray:
    """[local rows] rows of the whole that one rank has, where each block is divided by itself."""
    runs = [
        np.arange(block // tp_size, dtype=np.int64) + start + tp_rank * (block // tp_size)
        for start, block in zip([0, *accumulate(blocks)], blocks, strict=False)
    ]
    return np.concatenate(runs)


def _refusal(info: ParamInfo, problem: str) -> ConfigError:
    return ConfigError(
        f"parameter {info.name!r} of shape {info.global_shape}: {problem}; mend the declaration, "
        "or use_muon=False sends it to the element-wise child"
    )
