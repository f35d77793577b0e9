"""Every optimizer as its paper has it: one parameter, one process, float64, nothing of the library.

A rule maps a gradient and the state of its parameter to an update u; the weight then goes by
`w <- w - lr u`, with weight decay in one of four ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.reference import QUINTIC, muon_scale, orthogonalise

State = dict[str, Any]
Rule = Callable[[torch.Tensor, State], torch.Tensor]


def adam(beta1=0.9, beta2=0.999, eps=1e-8) -> Rule:
    """Kingma and Ba, with both averages corrected for their start at zero."""

    def rule(g, state):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0 * g) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0 * g) + (1 - beta2) * g * g
        return (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)

    return rule


def lion(beta1=0.95, beta2=0.98) -> Rule:
    """Chen et al.: the sign of one average, while another goes on."""

    def rule(g, state):
        m = state.get("m", 0 * g)
        state["m"] = beta2 * m + (1 - beta2) * g
        return torch.sign(beta1 * m + (1 - beta1) * g)

    return rule


def sgd(momentum=0.9) -> Rule:
    """The sum of past gradients, each step by `momentum` less."""

    def rule(g, state):
        state["m"] = momentum * state.get("m", 0 * g) + g
        return state["m"]

    return rule


def _momentum(g, state, beta, nesterov):
    m = state["m"] = beta * state.get("m", 0 * g) + (1 - beta) * g
    return beta * m + (1 - beta) * g if nesterov else m


def _to_norm(u, norm):
    present = u.norm()
    return u * (norm / present) if present > 0 else u


def muon(beta=0.95, nesterov=False, mode="spectral", coefficients=QUINTIC) -> Rule:
    """Jordan et al., with the three scales of `muon_scale`."""

    def rule(g, state):
        matrix = _momentum(g, state, beta, nesterov).flatten(1)
        scale = muon_scale(*matrix.shape, mode)
        return (scale * orthogonalise(matrix, coefficients)).view(g.shape)

    return rule


def normuon(beta=0.95, beta2=0.95, eps=1e-8, nesterov=False, mode="spectral") -> Rule:
    """Li et al., arXiv:2510.05491: rows of one size; the norm is that of what they come from."""

    def rule(g, state):
        o = orthogonalise(_momentum(g, state, beta, nesterov).flatten(1))
        v = beta2 * state.get("v", torch.zeros(len(o), 1)) + (1 - beta2) * (o * o).mean(1, True)
        state["v"] = v
        u = _to_norm(o / (v.sqrt() + eps), o.norm())
        return (muon_scale(*o.shape, mode) * u).view(g.shape)

    return rule


def adamuon(beta=0.95, beta2=0.95, eps=1e-8, nesterov=False) -> Rule:
    """Si et al., arXiv:2507.11005: the sign goes in, elements of 0.2 come out."""

    def rule(g, state):
        o = orthogonalise(torch.sign(_momentum(g, state, beta, nesterov)).flatten(1))
        v = state["v"] = beta2 * state.get("v", 0 * o) + (1 - beta2) * o * o
        return 0.2 * _to_norm(o / (v.sqrt() + eps), o.numel() ** 0.5).view(g.shape)

    return rule


def adaptive_muon(method, beta=0.95, beta2=0.95, eps=1e-8, mode="spectral") -> Rule:
    """What emerging-optimizers 0.3.0 calls so."""

    def rule(g, state):
        o = orthogonalise(_momentum(g, state, beta, False).flatten(1))
        squares = o * o
        if method == "normuon":
            squares = squares.mean(1 if o.shape[0] >= o.shape[1] else 0, keepdim=True)
        v = state["v"] = beta2 * state.get("v", 0 * squares) + (1 - beta2) * squares
        u = o / (v.sqrt() + eps)
        if method == "normuon":
            u = _to_norm(o / v.clamp_min(eps).sqrt(), o.norm())
        return (muon_scale(*o.shape, mode) * u).view(g.shape)

    return rule


@dataclass
class Stepped:
    """Parameters that are stepped by rules.

    Attributes:
        weights: name -> fp64 value.
        rules: name -> its rule.
        lr: learning rate.
        decay: name -> weight decay.
        mode: how it acts.
    """

    weights: dict[str, torch.Tensor]
    rules: dict[str, Rule]
    lr: float
    decay: dict[str, float]
    mode: str = "decoupled"
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {name: value.double() for name, value in self.weights.items()}

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        """One step with these gradients."""
        for name, w in self.weights.items():
            g, d, lr = grads[name].double(), self.decay[name], self.lr
            g = g + d * w if self.mode == "l2" else g
            u = self.rules[name](g, self.states.setdefault(name, {}))
            shrink = {
                "decoupled": lr * d * w,
                "independent": d * w,
                "l2": 0 * w,
                "cautious": lr * d * w * (u * w >= 0),
            }
            self.weights[name] = w - shrink[self.mode] - lr * u
