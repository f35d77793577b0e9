"""`Linear` and `quantize_model`: linear layers with quantised weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from megatron_lw.errors import ConfigError
from megatron_lw.fp8.linear_function import Matmul, linear
from megatron_lw.fp8.recipe import Recipe, as_recipe
from megatron_lw.fp8.tensor import QuantisedTensor

Predicate = Callable[[str, nn.Module], bool]


class Linear(nn.Linear):
    """A linear layer with a quantised weight.

    Args:
        weight: a Parameter of a `QuantisedTensor`, `[out_features, in_features]`.
        bias: bf16 `[out_features]`.
        matmul: see `linear`.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, matmul: Matmul = "auto"
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)
        self.matmul: Matmul = matmul

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input @ weight.T + bias`, bf16 `[..., out_features]`.

        A plain weight, which `load_state_dict(assign=True)` puts there, is multiplied as such.
        """
        if isinstance(self.weight, QuantisedTensor):
            return linear(input, self.weight, self.bias, self.matmul)
        return super().forward(input)

    def extra_repr(self) -> str:
        """Sizes, and the format of the weight."""
        weight = self.weight
        kept = weight.recipe.format if isinstance(weight, QuantisedTensor) else weight.dtype
        return f"{super().extra_repr()}, weight={kept}"


def quantize_model(
    model: nn.Module,
    recipe: Recipe | str,
    predicate: Predicate | None = None,
    *,
    keep_initial: bool = True,
    matmul: Matmul = "auto",
) -> nn.Module:
    """Quantise weights of a model in place, before it is wrapped.

    A `torch.nn.Linear` becomes a `Linear`. Of any other module that `predicate` accepts, `weight`
    becomes a quantised Parameter; its forward must use `torch.nn.functional.linear`. Tags of the
    weight stay.

    Args:
        model: with bf16 weights.
        recipe: a recipe, or the name of a format.
        predicate: takes a module's name and the module; every `torch.nn.Linear` if None.
        keep_initial: keep bf16 values until an optimizer has started its masters from them.
        matmul: see `linear`.

    Returns:
        The model; a new layer if `model` itself is a linear layer.

    Raises:
        ConfigError: no module is accepted, or the weight of one cannot be quantised: it is not
            bf16, is shared, or has a shape that the format does not have.
    """
    recipe = as_recipe(recipe)
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if (predicate(name, module) if predicate else type(module) is nn.Linear)
    ]
    if not chosen:
        raise ConfigError(
            "quantize_model: no module of the model is to be quantised; see predicate"
        )
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    made = {name: _quantised(name, module, recipe, users, keep_initial) for name, module in chosen}
    for name, module in chosen:
        if type(module) is not nn.Linear:
            module.register_parameter("weight", made[name])
            continue
        layer = Linear(made[name], module.bias, matmul).train(module.training)
        if not name:
            return layer
        model.set_submodule(name, layer)
    return model


def _quantised(
    name: str, module: nn.Module, recipe: Recipe, users: Counter[int], keep_initial: bool
) -> nn.Parameter:
    """The quantised Parameter of a module, with the tags of the plain one."""
    label = f"weight of module {name!r}"
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        raise ConfigError(f"quantize_model: module {name!r} has no parameter 'weight'")
    if users[id(weight)] > 1:
        raise ConfigError(
            f"the {label} is used by another module too; leave both out by the predicate"
        )
    made = QuantisedTensor.from_values(weight, recipe, keep_initial=keep_initial, name=label)
    param = nn.Parameter(made, requires_grad=weight.requires_grad)
    vars(param).update(vars(weight))
    return param
