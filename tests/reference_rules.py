"""Every optimizer as its paper has it: one parameter, one process, float64, nothing of the library.

A rule maps a gradient and the state of its parameter to an update u; the weight then goes by
`w <- w - lr u`, with weight decay in one of four ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

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
