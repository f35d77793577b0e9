"""`PlaneLayout` and `Planes`: the bytes and scales of quantised matrices, many in one record.

A matrix `[M, K]` has two planes: row-wise, which the forward multiplies with, and column-wise,
which the backward does. A plane is E4M3 bytes and scales:

| format | row-wise bytes, scales | column-wise bytes, scales |
|---|---|---|
| tensor, delayed | [M, K], fp32 [1] | [K, M], fp32 [1] |
| block | [M, K], fp32 [M/128, K/128] | [K, M], fp32 [K/128, M/128] |
| mxfp8 | [M, K], E8M0 [M, K/32] | [M, K], E8M0 [M/32, K] |
| mxfp8-2d | [M, K], E8M0 [M/32, K/32] | [M, K], E8M0 [M/32, K/32] |

Numbers of blocks are rounded up. An fp32 scale is the factor that gives the value back (the
"inverse scale"). The planes of all matrices that share a recipe, in a bucket or in one parameter,
lie one after another in four flat tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_lw.fp8.recipe import Recipe

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where the planes of some matrices lie.

    Attributes:
        recipe: their format.
        shapes: rows and columns of each matrix.
        data: start of each matrix in the bytes of either plane, and the end of the last.
        row_scales: the same for the scales of the row-wise plane.
        col_scales: the same for those of the column-wise plane.
    """

    recipe: Recipe
    shapes: tuple[Shape, ...]
    data: tuple[int, ...]
    row_scales: tuple[int, ...]
    col_scales: tuple[int, ...]

    @classmethod
    def build(cls, shapes: Sequence[Shape], recipe: Recipe) -> PlaneLayout:
        """Lay matrices out one after another.

        Raises:
            ConfigError: a shape has no blocks of the format.
        """
        for shape in shapes:
            recipe.check_shape("a matrix", tuple(shape))
        ends = [
            tuple(accumulate((_numel(count(shape, recipe)) for shape in shapes), initial=0))
            for count in (lambda shape, _: shape, row_scale_shape, col_scale_shape)
        ]
        return cls(recipe, tuple(shapes), *ends)

    def one(self, index: int) -> PlaneLayout:
        """The layout of one of the matrices alone."""
        return PlaneLayout.build([self.shapes[index]], self.recipe)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def row_scale_shape(shape: Shape, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the row-wise plane's scales."""
    if recipe.block is None:
        return (1,)
    rows, cols = recipe.block
    return (-(-shape[0] // rows), -(-shape[1] // cols))


def col_scale_shape(shape: Shape, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the column-wise plane's scales."""
    if recipe.format == "mxfp8" and recipe.block is not None:
        return (shape[0] // recipe.block[1], shape[1])
    return (
        row_scale_shape(shape, recipe)[::-1]
        if recipe.columns_transposed
        else row_scale_shape(shape, recipe)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """Both planes of some matrices.

    Attributes:
        layout: where each matrix lies.
        row_data: uint8, E4M3.
        row_scale: uint8 (E8M0) or fp32.
        col_data: as `row_data`.
        col_scale: as `row_scale`.
        history: `delayed` only: fp32 [matrices, 1 + history]. Entry 0 is the maximum of what is
            quantised now; the scale follows from the others, the newest first.
    """

    layout: PlaneLayout
    row_data: torch.Tensor
    row_scale: torch.Tensor
    col_data: torch.Tensor
    col_scale: torch.Tensor
    history: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, shapes: Sequence[Shape], recipe: Recipe, device: torch.device | str = "cpu"
    ) -> Planes:
        """Planes of zeros."""
        layout = PlaneLayout.build(shapes, recipe)
        kind = torch.uint8 if recipe.scales_are_codes else torch.float32

        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        return cls(
            layout=layout,
            row_data=zeros(layout.data[-1], torch.uint8),
            row_scale=zeros(layout.row_scales[-1], kind),
            col_data=zeros(layout.data[-1], torch.uint8),
            col_scale=zeros(layout.col_scales[-1], kind),
            history=(
                torch.zeros(len(shapes), 1 + recipe.history, device=device)
                if recipe.format == "delayed"
                else None
            ),
        )

    @property
    def recipe(self) -> Recipe:
        """The format."""
        return self.layout.recipe

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything they consist of, by name."""
        found = {
            "row_data": self.row_data,
            "row_scale": self.row_scale,
            "col_data": self.col_data,
            "col_scale": self.col_scale,
        }
        return found if self.history is None else {**found, "history": self.history}

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> Planes:
        """The same layout over other tensors."""
        return Planes(layout=self.layout, **tensors)

    def copy_(self, other: Planes) -> None:
        """Take the bytes, scales and histories of planes with the same layout."""
        for mine, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True):
            mine.copy_(theirs)

    def one(self, index: int) -> Planes:
        """The planes of one matrix. Aliases these."""
        at = self.layout

        def part(tensor: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
            return tensor[starts[index] : starts[index + 1]]

        return Planes(
            layout=at.one(index),
            row_data=part(self.row_data, at.data),
            row_scale=part(self.row_scale, at.row_scales),
            col_data=part(self.col_data, at.data),
            col_scale=part(self.col_scale, at.col_scales),
            history=None if self.history is None else self.history[index : index + 1],
        )
