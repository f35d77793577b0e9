"""The plain answer: one process, whole tensors, no buckets, nothing from the library under test.

Adam is `torch.optim.AdamW` (fused, on tensors padded to 64 elements with zeros: its vector and tail
loops differ in the last bit, and the library's rows have no tails). Muon is written out from the
paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass
class Settings:
    """Hyper-parameters of one parameter.

    `matrix` is its (rows, cols) view if Muon steps it, `parts` the rows of each matrix inside that;
    rows of none get no update.
    """

    lr: float
    weight_decay: float = 0.0
    matrix: tuple[int, int] | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.95
    nesterov: bool = False
    scale_mode: str = "spectral"
    extra: float = 1.0
    parts: tuple[tuple[int, ...], ...] | None = None


def orthogonalise(
    x: torch.Tensor, coefficients=QUINTIC, dtype=torch.float64, row_prescale=False
) -> torch.Tensor:
    """Newton-Schulz in fp64 on the short side; zero stays zero.

    `row_prescale`: divide row i by sqrt(sum_j |x x^T|_ij) first (almost-orthogonal layers).
    """
    x = x.to(dtype)
    norm = x.norm()
    if norm == 0:
        return x
    x = x / norm
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    if row_prescale:
        x = x / (x @ x.mT).abs().sum(dim=1, keepdim=True).sqrt()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_scale(rows: int, cols: int, mode: str) -> float:
    """The three scale modes, as published."""
    modes = {
        "spectral": max(rows, cols) ** 0.5,
        "unit_rms_norm": (rows / cols) ** 0.5,
        "shape_scaling": max(1.0, rows / cols) ** 0.5,
    }
    return modes[mode]


def pad64(x: torch.Tensor) -> torch.Tensor:
    """A flat fp32 copy padded with zeros to a multiple of 64 elements."""
    flat = torch.zeros(-(-x.numel() // 64) * 64)
    flat[: x.numel()] = x.reshape(-1)
    return flat


@dataclass
class Reference:
    """Masters of all parameters on one process."""

    values: dict[str, torch.Tensor]
    settings: dict[str, Settings]
    clip_grad: float = 0.0
    momenta: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.masters = {name: value.detach().float().clone() for name, value in self.values.items()}
        self._flat, self._adam = {}, {}
        for name, master in self.masters.items():
            s = self.settings[name]
            if s.matrix is not None:
                self.momenta[name] = torch.zeros(s.matrix)
                continue
            self._flat[name] = torch.nn.Parameter(pad64(master))
            self._adam[name] = torch.optim.AdamW(
                [self._flat[name]],
                lr=s.lr,
                betas=s.betas,
                eps=s.eps,
                weight_decay=s.weight_decay,
                fused=True,
            )

    def step(self, grads: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Step with mean gradients; returns their norm before clipping and how many are zero."""
        squares = sum(float(g.double().square().sum()) for g in grads.values())
        norm, zeros = math.sqrt(squares), sum(int((g == 0).sum()) for g in grads.values())
        clip = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        for name, grad in grads.items():
            grad = grad.float() * clip if clip < 1.0 else grad.float()
            s, master = self.settings[name], self.masters[name]
            if s.matrix is None:
                self._flat[name].grad = pad64(grad)
                self._adam[name].param_groups[0].update(lr=s.lr, weight_decay=s.weight_decay)
                self._adam[name].step()
                master.copy_(self._flat[name].detach()[: master.numel()].view(master.shape))
                continue
            momentum = self.momenta[name]
            momentum.lerp_(grad.view(s.matrix), 1 - s.momentum)
            update = (
                torch.lerp(grad.view(s.matrix), momentum, s.momentum) if s.nesterov else momentum
            )
            rows, cols = s.matrix
            change = torch.zeros(rows, cols)
            for part in s.parts or (tuple(range(rows)),):
                scale = muon_scale(len(part), cols, s.scale_mode) * s.extra
                change[list(part)] = scale * orthogonalise(update[list(part)]).float()
            master.mul_(1 - s.lr * s.weight_decay)
            master.add_(change.view(master.shape), alpha=-s.lr)
        return norm, zeros
