"""What modules tell of the weights that they hold, beyond shape and tags."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class WeightUse(NamedTuple):
    """What is known of a weight from its module.

    Attributes:
        is_table: whether it is an embedding table.
        depthwise: see `ParamInfo`.
    """

    is_table: bool = False
    depthwise: bool | None = None


def weight_uses(chunk: nn.Module) -> dict[int, WeightUse]:
    """`id` of a weight of an embedding or a convolution -> what its module tells."""
    found: dict[int, WeightUse] = {}
    for module in chunk.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found[id(module.weight)] = WeightUse(is_table=True)
        elif isinstance(module, _CONVOLUTIONS):
            depthwise = 1 < module.groups == module.in_channels
            found[id(module.weight)] = WeightUse(depthwise=depthwise)
    return found
