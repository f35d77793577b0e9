"""Muon: momentum, orthogonalised (Jordan et al. 2024), with Megatron's momentum and scale modes."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.children.matrix import MatrixChild
from megatron_lw.optimizer.matrix_view import Shape

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
SCALE_MODES: tuple[ScaleMode, ...] = get_args(ScaleMode)


def scale_factor(rows: int, columns: int, mode: ScaleMode) -> float:
    """How much of an orthogonal matrix makes one unit of update.

    `spectral` sqrt(max(rows, columns)): times 0.2 it matches AdamW's update size (Moonlight,
    arXiv:2502.16982). `unit_rms_norm` sqrt(rows / columns): keeps the RMS of activations (Scion,
    arXiv:2502.07529). `shape_scaling` sqrt(max(1, rows / columns)): the original Muon.

    Args:
        rows: of the whole matrix, without padding (outputs).
        columns: of the whole matrix (inputs).
        mode: one of the three.

    Raises:
        ConfigError: unknown mode.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / columns)
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    raise ConfigError(
        f"scale_mode = {mode!r} is unknown; use spectral, unit_rms_norm or shape_scaling"
    )


class Muon(MatrixChild):
    """`m <- beta m + (1 - beta) g`; with Nesterov `u = beta m + (1 - beta) g`, else `u = m`.

    The update is `-lr * scale * extra * NewtonSchulz(u)`, after decoupled weight decay.
    """

    name = "muon"

    def update_momentum(
        self, momentum: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, group: ParamGroup
    ) -> None:
        """See `MatrixChild.update_momentum`."""
        beta = float(group["momentum"])
        momentum.lerp_(grad, 1.0 - beta)
        if group["nesterov"]:
            scratch = self._scratch[: grad.numel()]
            out.copy_(torch.lerp(grad, momentum, beta, out=scratch))
        else:
            out.copy_(momentum)

    def scale(self, shape: Shape, group: ParamGroup) -> float:
        """See `MatrixChild.scale`."""
        extra = float(group["extra_scale_factor"])
        return scale_factor(*shape, group["scale_mode"]) * extra
