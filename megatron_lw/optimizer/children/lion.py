"""Lion: steps of one size, in the direction of a sign (Chen et al., arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.children.decay import shrink
from megatron_lw.optimizer.children.elementwise import ElementwiseChild, Runs


class LionChild(ElementwiseChild):
    """`u = sign(b1 m + (1 - b1) g)`, `w <- w - lr u`, `m <- b2 m + (1 - b2) g`."""

    name = "lion"
    state_keys: tuple[str, ...] = ("exp_avg",)

    def advance(
        self, weights: Runs, grads: Runs, states: Mapping[str, Runs], group: ParamGroup
    ) -> None:
        """See `ElementwiseChild.advance`."""
        averages = states["exp_avg"]
        beta1, beta2 = group["betas"]
        updates = torch._foreach_lerp(averages, grads, 1.0 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_lerp_(averages, grads, 1.0 - beta2)
        shrink(weights, updates, group)
        torch._foreach_add_(weights, updates, alpha=-float(group["lr"]))
