"""Who orthogonalises a matrix that tensor parallelism divides: the mode, and what it means for one.

    owner        its owner collects the shards and sends the update back: exact, nothing repeated
    duplicated   every rank that has a shard collects the others: exact, repeated, nothing sent back
    distributed  shards stay; the ranks sum their Gram matrices at every iteration: exact
    blockwise    each shard is orthogonalised by itself: inexact, the result depends on the layout

The names are Megatron's, but for `owner`. A matrix that tensor parallelism replicates has one owner
in every mode.
"""

from __future__ import annotations

from typing import Literal, get_args

from megatron_lw.optimizer.matrix_view import MatrixUnit, MatrixView

TpMode = Literal["owner", "duplicated", "distributed", "blockwise"]
TP_MODES: tuple[TpMode, ...] = get_args(TpMode)
Home = Literal["owner", "every", "parts"]
"""Where a unit is orthogonalised: by its owner, by every tensor-parallel rank, or where it lies."""


def home_of(mode: TpMode, view: MatrixView, unit: MatrixUnit, tp_size: int) -> Home:
    """Where a unit is orthogonalised.

    Shards along the short side have no common Gram matrix of that side: `distributed` collects such
    a matrix on every rank, as `duplicated` does.

    Args:
        mode: `OptimizerConfig.muon_tp_mode`.
        view: of the parameter.
        unit: of the view.
        tp_size: tensor-parallel ranks.
    """
    if view.tp_dim is None or tp_size == 1 or mode == "owner":
        return "owner"
    if mode == "duplicated" or (mode == "distributed" and not _along_long_side(view, unit)):
        return "every"
    return "parts"


def _along_long_side(view: MatrixView, unit: MatrixUnit) -> bool:
    """Whether the divided side of every part is at least as long as the other."""
    shapes = [(part.rows, view.cols) for part in unit.parts]
    if view.tp_dim == 0:
        return all(rows >= cols for rows, cols in shapes)
    return all(cols >= rows for rows, cols in shapes)
