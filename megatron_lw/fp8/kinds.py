"""What kind of weight a parameter is: plain, quantised here, or Transformer Engine's."""

from __future__ import annotations

import torch

from megatron_lw.errors import ConfigError
from megatron_lw.fp8.te import buffers, is_theirs, recipe_of
from megatron_lw.fp8.tensor import QuantisedTensor


def is_quantised(param: torch.Tensor) -> bool:
    """Whether a parameter is kept as planes."""
    return isinstance(param, QuantisedTensor) or is_theirs(param)


def recipe_text(name: str, param: torch.Tensor) -> str | None:
    """The recipe of a quantised parameter, to be compared over the ranks; None for a plain one.

    Raises:
        ConfigError: it is a tensor of another kind, which keeps its values in its own way.
    """
    if isinstance(param, QuantisedTensor):
        return repr(param.recipe)
    theirs = recipe_of(name, param)
    if theirs is not None:
        return f"{theirs!r} of Transformer Engine, with {', '.join(buffers(name, param))}"
    if type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ConfigError(
            f"parameter {name!r} is a {type(param).__name__}; weights are plain tensors, quantised "
            "by fp8.quantize_model, or tensors of Transformer Engine"
        )
    return None


def address(name: str, param: torch.Tensor) -> int:
    """Where a parameter lies: its own memory, or the first plane of a quantised one.

    Raises:
        ConfigError: a kind of Transformer Engine's that is not supported.
    """
    if isinstance(param, QuantisedTensor):
        return param.planes.row_data.data_ptr()
    if is_theirs(param):
        return next(iter(buffers(name, param).values())).data_ptr()
    return param.data_ptr()


def stored(label: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of which a parameter consists. Aliases it.

    Args:
        label: what messages call it.
        param: plain or quantised.
    """
    if isinstance(param, QuantisedTensor):
        return {f"{name} of {label}": each for name, each in param.planes.tensors().items()}
    if is_theirs(param):
        return {f"{name} of {label}": each for name, each in buffers(label, param).items()}
    return {label: param.detach()}
