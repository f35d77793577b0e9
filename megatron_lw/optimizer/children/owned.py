"""The matrices that one rank orthogonalises, taken out of the units in which they travelled.

A part that is a run of rows is a view of its unit. One whose rows lie among others (query rows of
every group of a fused QKV weight) is gathered into scratch memory and scattered back. Rows that no
part has are padding: they are read by nobody, and their update is exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from megatron_lw.optimizer.children.exchange import copy_all
from megatron_lw.optimizer.matrix_view import MatrixUnit, Shape
from megatron_lw.optimizer.pieces import IntArray

_ALIGNMENT = 64


class OwnedUnit(NamedTuple):
    """A unit on this rank.

    Attributes:
        matrix: index of the unit in the plan.
        unit: which rows are which parts.
        values: [rows, columns] of the whole unit, or of this rank's shard of it.
        rows: [rows] which row of the whole unit each row of `values` is.
        cols: columns of the whole unit.
        in_parts: whether `values` is a shard that is orthogonalised where it lies.
    """

    matrix: int
    unit: MatrixUnit
    values: torch.Tensor
    rows: IntArray
    cols: int
    in_parts: bool


class OwnedMatrix(NamedTuple):
    """One matrix to orthogonalise in place.

    Attributes:
        matrix: index of its unit in the plan.
        part: index of the part in the unit.
        shape: rows and columns of the whole matrix, without padding.
        values: contiguous, [rows, columns] of the whole, or of this rank's shard of it.
        in_parts: whether it is a shard that is orthogonalised where it lies.
    """

    matrix: int
    part: int
    shape: Shape
    values: torch.Tensor
    in_parts: bool


def part_rows(unit: MatrixUnit, rows: IntArray) -> list[IntArray]:
    """For each part of a unit its rows among `rows`, ascending.

    Args:
        unit: whose parts.
        rows: [rows] rows of the unit that this rank has.
    """
    part_of = np.full(unit.rows, -1, dtype=np.int64)
    for number, part in enumerate(unit.parts):
        part_of[part.indices()] = number
    return [np.flatnonzero(part_of[rows] == number) for number in range(len(unit.parts))]


def scratch_numel(units: Iterable[tuple[MatrixUnit, IntArray, int]]) -> int:
    """Elements that parts need which are no run of rows.

    Args:
        units: each with the rows and the columns that this rank has of it.
    """
    return sum(
        _aligned(len(found) * width)
        for unit, rows, width in units
        for found in part_rows(unit, rows)
        if len(_runs(found)) > 1
    )


class OwnedMatrices:
    """The matrices of one bucket.

    Args:
        units: the bucket's units on this rank.
        scratch: `scratch_numel` elements or more, of the units' dtype.

    Attributes:
        matrices: what is orthogonalised.
    """

    def __init__(self, units: Sequence[OwnedUnit], scratch: torch.Tensor) -> None:
        self.matrices: list[OwnedMatrix] = []
        self._gathered: list[torch.Tensor] = []
        self._scattered: list[torch.Tensor] = []
        self._padding: list[torch.Tensor] = []
        cursor = 0
        for each in units:
            width = each.values.size(1)
            is_padding = np.ones(len(each.rows), dtype=np.bool_)
            for number, found in enumerate(part_rows(each.unit, each.rows)):
                is_padding[found] = False
                runs = _runs(found)
                if len(runs) > 1:
                    values = scratch[cursor : cursor + len(found) * width].view(-1, width)
                    cursor += _aligned(values.numel())
                    self._note(each.values, values, runs)
                else:
                    start, stop = runs[0] if runs else (0, 0)
                    values = each.values[start:stop]
                shape = (each.unit.parts[number].rows, each.cols)
                self.matrices.append(OwnedMatrix(each.matrix, number, shape, values, each.in_parts))
            padding = _runs(np.flatnonzero(is_padding))
            self._padding += [each.values[start:stop] for start, stop in padding]

    def load(self) -> None:
        """Gather the parts whose rows lie apart."""
        copy_all(self._gathered, self._scattered)

    def store(self) -> None:
        """Scatter them back, and zero the rows of no part."""
        copy_all(self._scattered, self._gathered)
        if self._padding:
            torch._foreach_zero_(self._padding)

    def _note(
        self, unit: torch.Tensor, values: torch.Tensor, runs: Sequence[tuple[int, int]]
    ) -> None:
        """Note the copies of one part: a single one where runs are equal and equally far apart."""
        lengths = {stop - start for start, stop in runs}
        strides = {second - first for (first, _), (second, _) in pairwise(runs)}
        if len(lengths) == len(strides) == 1:
            [length], [stride] = lengths, strides
            width = unit.size(1)
            size = (len(runs), length, width)
            offset = unit.storage_offset() + runs[0][0] * width
            self._scattered.append(unit.as_strided(size, (stride * width, width, 1), offset))
            self._gathered.append(values.view(size))
            return
        self._scattered += [unit[start:stop] for start, stop in runs]
        self._gathered += values.split([stop - start for start, stop in runs])


def _runs(rows: IntArray) -> list[tuple[int, int]]:
    """Ascending rows as (start, stop) runs."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1)
    starts = rows[np.concatenate([[0], breaks + 1])]
    stops = rows[np.concatenate([breaks, [len(rows) - 1]])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
