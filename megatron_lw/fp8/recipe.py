"""`Recipe`: in which FP8 format a weight is kept. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from megatron_lw.errors import ConfigError

Format = Literal["tensor", "delayed", "block", "mxfp8", "mxfp8-2d"]
"""What shares a scale: a tensor (`tensor`, `delayed`), 128x128 (`block`), 1x32, 32x32."""

BLOCK = 128
MX_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are quantised to E4M3.

    Attributes:
        format: what shares a scale, and how scales are written.
        fp32_scales: `block` only: scales keep their mantissa; else they are powers of two.
        history: `delayed` only: maxima of past updates from which a scale follows.
        derive_columns: `mxfp8` only: the column-wise plane is quantised from the row-wise one, so
            that only the row-wise one travels (1.03 bytes a weight in place of 2). Its bytes then
            differ from Transformer Engine's.

    Raises:
        ConfigError: an unknown format, or a setting that belongs to another one.
    """

    format: Format
    fp32_scales: bool = False
    history: int = 16
    derive_columns: bool = False

    def __post_init__(self) -> None:
        """Check the settings against the format."""
        if self.format not in get_args(Format):
            raise ConfigError(
                f"Recipe.format={self.format!r} is no format; choose among "
                + ", ".join(get_args(Format))
            )
        for name, value, default, owner in (
            ("fp32_scales", self.fp32_scales, False, "block"),
            ("history", self.history, 16, "delayed"),
            ("derive_columns", self.derive_columns, False, "mxfp8"),
        ):
            if value != default and self.format != owner:
                raise ConfigError(
                    f"Recipe.{name}={value!r} belongs to format {owner!r}, not {self.format!r}; "
                    "drop it"
                )
        if self.history < 1:
            raise ConfigError(f"Recipe.history={self.history}: give at least 1")

    @property
    def label(self) -> str:
        """The format with its settings, for names in checkpoints."""
        settings = {
            "block": f",fp32_scales={self.fp32_scales}",
            "delayed": f",history={self.history}",
            "mxfp8": f",derive_columns={self.derive_columns}",
        }
        return self.format + settings.get(self.format, "")

    @property
    def scales_are_codes(self) -> bool:
        """Whether a scale is an E8M0 byte: 2 to the power of the byte minus 127."""
        return self.format in ("mxfp8", "mxfp8-2d")

    @property
    def columns_transposed(self) -> bool:
        """Whether the column-wise plane is the transpose of the row-wise one."""
        return not self.scales_are_codes

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None where all of a matrix does.

        For `mxfp8` those of the row-wise plane; in the column-wise plane they change places.
        """
        if self.format == "mxfp8":
            return (1, MX_BLOCK)
        if self.format == "mxfp8-2d":
            return (MX_BLOCK, MX_BLOCK)
        return (BLOCK, BLOCK) if self.format == "block" else None

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a shape that has no such blocks.

        Raises:
            ConfigError: not a matrix, or MXFP8 with a side that 32 does not divide.
        """
        if len(shape) != 2 or 0 in shape:
            raise ConfigError(
                f"{name} of shape {shape} cannot be quantised: FP8 is for matrices with elements"
            )
        if self.scales_are_codes and any(side % MX_BLOCK for side in shape):
            raise ConfigError(
                f"{name} of shape {shape} cannot be {self.format}: both sides must be multiples of "
                f"{MX_BLOCK}; leave it to the predicate of quantize_model, or choose 'block'"
            )


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe, also from the name of its format.

    Raises:
        ConfigError: the name is no format.
    """
    return recipe if isinstance(recipe, Recipe) else Recipe(format=cast(Format, recipe))
