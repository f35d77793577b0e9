"""`Part` and `Run`: which elements of which matrices lie where in a flat tensor of values.

A bucket gives its matrices as parts of one flat tensor: whole, or what a row holds of one that is
cut. Whole matrices that lie back to back and have the same rows of blocks are one run, for which
each operation is called once, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_lw.fp8.planes import PlaneLayout, Shape
from megatron_lw.fp8.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some elements of a matrix in a flat tensor.

    Attributes:
        matrix: its index in the layout of the planes.
        start: first element, counted in the matrix row by row.
        numel: elements.
        offset: where the first one lies in the flat tensor.
    """

    matrix: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Whole matrices that lie back to back, or a part of one, as rows and columns.

    Attributes:
        matrix: index of the first matrix.
        offset: where it begins in the flat tensor.
        rows: rows of all its matrices together.
        cols: elements of a row.
        start: first element of a part of a matrix; 0 for whole ones.
        numel: elements in the flat tensor.
    """

    matrix: int
    offset: int
    rows: int
    cols: int
    start: int
    numel: int

    @property
    def whole(self) -> bool:
        """Whether it holds whole matrices only."""
        return self.numel == self.rows * self.cols

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """What it holds of a flat tensor of values: `[rows, cols]` if whole, else `[numel]`."""
        part = flat[self.offset : self.offset + self.numel]
        return part.view(self.rows, self.cols) if self.whole else part


def blocks_of(recipe: Recipe, cols: int) -> tuple[int, int]:
    """Rows and columns of a block of the row-wise plane, for runs with so many columns."""
    return (1, cols) if recipe.block is None else recipe.block


def plan_runs(parts: Iterable[Part], layout: PlaneLayout) -> tuple[Run, ...]:
    """Join whole matrices into runs.

    Args:
        parts: in the order of matrices.
        layout: of the planes; its recipe says which matrices can be joined.
    """
    runs: list[Run] = []
    last = -1
    for part in parts:
        rows, cols = _as_rows(layout.shapes[part.matrix], layout.recipe)
        run = Run(
            matrix=part.matrix,
            offset=part.offset,
            rows=rows,
            cols=cols,
            start=part.start,
            numel=part.numel,
        )
        before = runs[-1] if runs and part.matrix == last + 1 else None
        if before is not None and _abut(before, run, layout.recipe):
            runs[-1] = replace(before, rows=before.rows + run.rows, numel=before.numel + run.numel)
        else:
            runs.append(run)
        last = part.matrix
    return tuple(runs)


def whole_parts(shapes: Sequence[Shape], offsets: Sequence[int]) -> list[Part]:
    """The parts of whole matrices at given places of a flat tensor."""
    return [
        Part(matrix=index, start=0, numel=rows * cols, offset=offset)
        for index, ((rows, cols), offset) in enumerate(zip(shapes, offsets, strict=True))
    ]


def _as_rows(shape: Shape, recipe: Recipe) -> Shape:
    """Rows and columns for the blocks of a format; all elements are one row for `tensor`."""
    return (1, shape[0] * shape[1]) if recipe.block is None else shape


def _abut(before: Run, run: Run, recipe: Recipe) -> bool:
    """Whether two runs are one: back to back, as wide, no block across their border."""
    high = max(blocks_of(recipe, run.cols)[0], 32 if recipe.format == "mxfp8" else 1)
    return (
        before.whole
        and run.whole
        and before.cols == run.cols
        and before.offset + before.numel == run.offset
        and before.rows % high == 0
    )
