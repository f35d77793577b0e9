"""Names for what an owner keeps of one matrix, whatever stack of matrices it is from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lw.optimizer.children.base import OwnedState
from megatron_lw.optimizer.routing import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which matrix of which parameter.

    Attributes:
        param: global name of the parameter.
        index: which matrix of the global stack.
        stack: matrices in that stack; None where the parameter is no stack.
        part: which of the matrices fused in a stored one; None where there is one.
    """

    param: str
    index: int = 0
    stack: int | None = None
    part: int | None = None

    @property
    def label(self) -> str:
        """What tells the values of a stack apart."""
        return "" if self.stack is None else f"[{self.index}]"

    def state(self, key: str, tensor: torch.Tensor) -> OwnedState:
        """The tensor as a part of the logical one: of a stack, one along a first dimension.

        States of matrices that are fused have keys of their own, as their shapes may differ.
        """
        if self.part is not None:
            key = f"{key}.{self.part}"
        start, shape = (0,) * tensor.ndim, tuple(tensor.shape)
        if self.stack is not None:
            tensor = tensor.unsqueeze(0)
            start, shape = (self.index, *start), (self.stack, *shape)
        return OwnedState(param=self.param, key=key, tensor=tensor, global_shape=shape, start=start)


def place_of(route: Route, local: int, part: int | None = None) -> Place:
    """The place of a matrix.

    Args:
        route: of its parameter.
        local: which of the stored matrices of this rank's part of the parameter it is.
        part: which of the matrices that are fused in it; None where it is one.
    """
    info, view = route.info, route.matrix
    if view is None or (view.count == 1 and info.ep_size == 1):
        return Place(param=info.name, part=part)
    of_one = 1 if len(info.global_shape) > 2 else view.rows
    first = min(pair.world.start[0] for pair in info.boxes) // of_one
    stack = info.global_shape[0] // of_one
    return Place(param=info.name, index=first + local, stack=stack, part=part)
