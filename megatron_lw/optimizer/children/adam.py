"""Adam, element by element on flat rows; all runs of a parameter group in one fused call.

Kingma and Ba (arXiv:1412.6980), decoupled decay after Loshchilov and Hutter (arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_lw.optimizer.children.adam_backends import AdamBackend
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.children.decay import shrink
from megatron_lw.optimizer.children.elementwise import ElementwiseChild, Runs
from megatron_lw.optimizer.masters import MasterRow


class AdamChild(ElementwiseChild):
    """Steps its buckets with Adam.

    Args:
        masters: rows of its buckets.
        group_of: parameter name -> parameter-group name.
        backend: the fused kernel.
    """

    name = "adam"
    state_keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, masters: Sequence[MasterRow], group_of: Mapping[str, str], backend: AdamBackend
    ) -> None:
        super().__init__(masters, group_of)
        self.backend = backend

    def advance(
        self, weights: Runs, grads: Runs, states: Mapping[str, Runs], group: ParamGroup
    ) -> None:
        """See `ElementwiseChild.advance`.

        The kernel decays decoupled. The cautious mode has to know the update, so it asks for one
        from zero weights first, where the step is nothing but the update.
        """
        mode = group["weight_decay_mode"]
        cautious = mode == "cautious" and float(group["weight_decay"]) > 0.0
        if mode == "independent":
            shrink(weights, None, group)
        stepped = [torch.zeros_like(weight) for weight in weights] if cautious else weights
        self.backend(
            stepped,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            step=self.num_steps,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]) if mode == "decoupled" else 0.0,
        )
        if cautious:
            shrink(weights, torch._foreach_neg(stepped), group)
            torch._foreach_add_(weights, stepped)
