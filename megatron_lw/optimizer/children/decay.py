"""Weight decay: how a weight w shrinks, with learning rate lr, decay d, gradient g and update u.

    decoupled    w <- (1 - lr d) w            Loshchilov and Hutter, arXiv:1711.05101
    independent  w <- (1 - d) w               the same, whatever the learning rate
    l2           g <- g + d w                 before momentum and moments see it
    cautious     w <- w - lr d w [u w >= 0]   only where the step shrinks the weight anyway

u is what the step takes away from the weight, so that u w > 0 means towards zero.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from megatron_lw.optimizer.children.base import ParamGroup

DecayMode = Literal["decoupled", "independent", "l2", "cautious"]
DECAY_MODES: tuple[DecayMode, ...] = get_args(DecayMode)

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


def with_l2(grads: Tensors, weights: Tensors, group: ParamGroup) -> list[torch.Tensor]:
    """The gradients, plus d w under "l2", where they are new tensors: what is handed in stays.

    Args:
        grads: fp32, one a run.
        weights: fp32, the same runs.
        group: settings of the runs.
    """
    decay = float(group["weight_decay"])
    if group["weight_decay_mode"] != "l2" or decay == 0.0:
        return list(grads)
    return list(torch._foreach_add(list(grads), list(weights), alpha=decay))


def shrink(weights: Tensors, updates: Tensors | None, group: ParamGroup) -> None:
    """Decay weights in place before their update, by every mode but "l2".

    Args:
        weights: one tensor a run.
        updates: what the step takes away, up to a positive factor; only "cautious" reads it.
        group: settings of the runs.
    """
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    mode: DecayMode = group["weight_decay_mode"]
    if mode == "decoupled":
        torch._foreach_mul_(weights, 1.0 - lr * decay)
    elif mode == "independent":
        torch._foreach_mul_(weights, 1.0 - decay)
    elif mode == "cautious" and updates is not None and decay > 0.0:
        for weight, update in zip(weights, updates, strict=True):
            weight.sub_(torch.where(update * weight >= 0, weight, 0.0), alpha=lr * decay)
