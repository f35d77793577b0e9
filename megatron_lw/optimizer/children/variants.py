"""Muon's variants: what is done to an orthogonalised matrix O before it is an update.

All take momentum, Newton-Schulz and exchange from Muon. Their second moment v is shaped by the
matrix, so it lives at the owner. `norm` is the Frobenius norm.

    normuon        v <- b2 v + (1 - b2) mean of O^2 over each row;  U = O / (sqrt(v) + eps)
                   U <- U norm(O) / norm(U), times Muon's scale
    adamuon        O comes from sign(u);  v <- b2 v + (1 - b2) O^2;  U = O / (sqrt(v) + eps)
                   U <- U sqrt(rows columns) / norm(U), times 0.2: its elements have that size
    adaptive_muon  as emerging-optimizers 0.3.0 has them:
      "adamuon"    O comes from u;  U = O / (sqrt(v) + eps), times Muon's scale
      "normuon"    means over the longer side;  U = O / sqrt(max(v, eps)), then as normuon

Li et al. (NorMuon, arXiv:2510.05491); Si et al. (AdaMuon, arXiv:2507.11005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.children.muon import Muon
from megatron_lw.optimizer.matrix_view import Shape

UPDATE_RMS = 0.2
"""Root mean square of AdaMuon's update, per unit of learning rate: about that of Adam's."""
_MOMENT = "second_moment"


class NorMuon(Muon):
    """Every row of an update gets the same size, in the long run."""

    name = "normuon"
    refines = True

    def own_shapes(self, shape: Shape) -> Mapping[str, tuple[int, ...]]:
        """See `MatrixChild.own_shapes`."""
        return {_MOMENT: (shape[0],)}

    def refine(
        self, update: torch.Tensor, states: Mapping[str, torch.Tensor], group: ParamGroup
    ) -> None:
        """See `MatrixChild.refine`."""
        ortho = update.float()
        moment = states[_MOMENT].lerp_(ortho.square().mean(dim=1), 1.0 - float(group["beta2"]))
        refined = ortho / moment.sqrt().add_(float(group["eps"]))[:, None]
        update.copy_(_with_norm(refined, torch.linalg.vector_norm(ortho)))


class AdaMuon(Muon):
    """Every element of an update gets the same size, in the long run."""

    name = "adamuon"
    refines = True

    def update_momentum(
        self, momentum: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, group: ParamGroup
    ) -> None:
        """See `MatrixChild.update_momentum`."""
        super().update_momentum(momentum, grad, out, group)
        out.sign_()

    def own_shapes(self, shape: Shape) -> Mapping[str, tuple[int, ...]]:
        """See `MatrixChild.own_shapes`."""
        return {_MOMENT: shape}

    def refine(
        self, update: torch.Tensor, states: Mapping[str, torch.Tensor], group: ParamGroup
    ) -> None:
        """See `MatrixChild.refine`."""
        refined = _by_element(update.float(), states, group)
        update.copy_(_with_norm(refined, math.sqrt(refined.numel())))

    def scale(self, shape: Shape, group: ParamGroup) -> float:
        """See `MatrixChild.scale`."""
        return UPDATE_RMS * float(group["extra_scale_factor"])


class AdaptiveMuon(Muon):
    """Megatron's `adaptive_muon`, with the arithmetic of emerging-optimizers.

    Args:
        method: "adamuon" or "normuon".
        places: arguments of `MatrixChild`.
        options: keyword arguments of it.
    """

    name = "adaptive_muon"
    refines = True

    def __init__(self, method: str, *places: Any, **options: Any) -> None:
        self._method = method
        super().__init__(*places, **options)

    def own_shapes(self, shape: Shape) -> Mapping[str, tuple[int, ...]]:
        """See `MatrixChild.own_shapes`."""
        if self._method == "adamuon":
            return {_MOMENT: shape}
        return {_MOMENT: (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])}

    def refine(
        self, update: torch.Tensor, states: Mapping[str, torch.Tensor], group: ParamGroup
    ) -> None:
        """See `MatrixChild.refine`."""
        ortho = update.float()
        if self._method == "adamuon":
            update.copy_(_by_element(ortho, states, group))
            return
        longer = 1 if ortho.size(0) >= ortho.size(1) else 0
        mean = ortho.square().mean(dim=longer, keepdim=True)
        moment = states[_MOMENT].lerp_(mean, 1.0 - float(group["beta2"]))
        refined = ortho * moment.clamp_min(float(group["eps"])).rsqrt_()
        update.copy_(_with_norm(refined, torch.linalg.vector_norm(ortho)))


def _by_element(
    ortho: torch.Tensor, states: Mapping[str, torch.Tensor], group: ParamGroup
) -> torch.Tensor:
    moment = states[_MOMENT].lerp_(ortho.square(), 1.0 - float(group["beta2"]))
    return ortho / moment.sqrt().add_(float(group["eps"]))


def _with_norm(matrix: torch.Tensor, norm: torch.Tensor | float) -> torch.Tensor:
    """The matrix, scaled to a Frobenius norm; zeros stay zeros."""
    present = torch.linalg.vector_norm(matrix)
    factor = torch.where(present > 0, norm / present, torch.zeros_like(present))
    return matrix * factor
