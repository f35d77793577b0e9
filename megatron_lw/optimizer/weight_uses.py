"""What modules tell of the weights that they hold, beyond shape and tags."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from megatron_lw.errors import ConfigError

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
    """`id` of a weight of an embedding or a convolution -> what its module tells.

    Raises:
        ConfigError: a module rewrites a weight that is stepped whenever it is called.
    """
    found: dict[int, WeightUse] = {}
    for name, module in chunk.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None and module.weight.requires_grad:
                raise ConfigError(
                    f"module {name!r} has max_norm = {module.max_norm}: its forward rewrites the "
                    "weight, which every step sets from the masters again; drop max_norm, and "
                    "scale down what the module returns"
                )
            found[id(module.weight)] = WeightUse(is_table=True)
        elif isinstance(module, _CONVOLUTIONS):
            depthwise = 1 < module.groups == module.in_channels
            found[id(module.weight)] = WeightUse(depthwise=depthwise)
    return found
