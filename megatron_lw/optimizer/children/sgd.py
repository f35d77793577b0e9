"""Stochastic gradient descent with momentum, as `torch.optim.SGD` has it without dampening."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.children.decay import shrink
from megatron_lw.optimizer.children.elementwise import ElementwiseChild, Runs


class SGDChild(ElementwiseChild):
    """`m <- mu m + g`, `w <- w - lr m`."""

    name = "sgd"
    state_keys: tuple[str, ...] = ("momentum_buffer",)

    def advance(
        self, weights: Runs, grads: Runs, states: Mapping[str, Runs], group: ParamGroup
    ) -> None:
        """See `ElementwiseChild.advance`."""
        momenta = states["momentum_buffer"]
        torch._foreach_mul_(momenta, float(group["momentum"]))
        torch._foreach_add_(momenta, grads)
        shrink(weights, momenta, group)
        torch._foreach_add_(weights, momenta, alpha=-float(group["lr"]))
