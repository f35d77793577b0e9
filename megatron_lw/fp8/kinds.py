"""What kind of weight a parameter is: plain, quantised here, or Transformer Engine's."""

from __future__ import annotations

import torch

from megatron_lw.errors import ConfigError
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import Plane, dequantise, derive_columns, quantise_all
from megatron_lw.fp8.te import (
    is_theirs,
    read_planes,
    recipe_of,
    require_recipe,
    take_kept,
    write_planes,
)
from megatron_lw.fp8.te_buffers import buffers
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
        return f"{theirs!r} of Transformer Engine, with {', '.join(buffers(name, param, theirs))}"
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
        return next(iter(buffers(name, param, require_recipe(name, param)).values())).data_ptr()
    return param.data_ptr()


def planes_of(name: str, param: torch.Tensor) -> tuple[Planes, Plane]:
    """A copy of what a quantised parameter consists of, and which plane its values are in.

    Args:
        name: global name, for messages.
        param: a quantised parameter.
    """
    if isinstance(param, QuantisedTensor):
        tensors = {key: each.clone() for key, each in param.planes.tensors().items()}
        return param.planes.with_tensors(tensors), "row"
    recipe = require_recipe(name, param)
    planes = Planes.empty([(param.shape[0], param.shape[1])], recipe, param.device)
    held = read_planes(name, param, planes)
    if len(held) == 1:
        _complete(name, param, planes, held[0])
    return planes, held[0]


def _complete(name: str, param: torch.Tensor, planes: Planes, held: Plane) -> None:
    """Fill the plane that a weight of Transformer Engine does not keep, from the one that it does.

    Where both planes have one scale, either is the other's transpose; a column-wise plane alone is
    quantised anew. Elsewhere each has scales of its own, and bytes that are kept stay.
    """
    has_one_scale = planes.recipe.block is None
    if has_one_scale and held == "row":
        derive_columns(planes)
        return
    values = dequantise(planes, torch.bfloat16, held)
    quantise_all(values.contiguous().view(-1), planes, "restart")
    if not has_one_scale:
        read_planes(name, param, planes)


def put_planes(name: str, param: torch.Tensor, planes: Planes) -> None:
    """Give a quantised parameter bytes and scales; values from before quantisation are let go of.

    Args:
        name: global name, for messages.
        param: a quantised parameter.
        planes: of its shape and recipe.
    """
    if isinstance(param, QuantisedTensor):
        param.planes.copy_(planes)
        param.free_initial()
    else:
        write_planes({name: param}, planes)


def forget_initial(param: torch.Tensor) -> None:
    """Let go of a quantised parameter's values before quantisation; no master will start there."""
    if isinstance(param, QuantisedTensor):
        param.free_initial()
    else:
        take_kept(param)


def stored(label: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of which a parameter consists. Aliases it.

    Args:
        label: what messages call it.
        param: plain or quantised.
    """
    if isinstance(param, QuantisedTensor):
        return {f"{name} of {label}": each for name, each in param.planes.tensors().items()}
    if is_theirs(param):
        found = buffers(label, param, require_recipe(label, param))
        return {f"{name} of {label}": each for name, each in found.items()}
    return {label: param.detach()}
