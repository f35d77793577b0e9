"""`QuantisedWeights`: the weights of a bucket that share a recipe, their planes side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import History, dequantise, quantise
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.runs import plan_runs, whole_parts
from megatron_lw.fp8.tensor import QuantisedTensor


class QuantisedWeights:
    """Quantised weights that are worked on in one call.

    Building it moves their planes into common storage, once; addresses never change afterwards.

    Args:
        params: global name -> weight, all of one recipe, in the order in which they lie.

    Attributes:
        params: the same.
        planes: of all of them, one matrix a weight, in that order.
    """

    def __init__(self, params: Mapping[str, QuantisedTensor]) -> None:
        self.params = dict(params)
        first = next(iter(self.params.values()))
        shapes = [(param.shape[0], param.shape[1]) for param in self.params.values()]
        self.planes = Planes.empty(shapes, first.recipe, first.device)
        for index, param in enumerate(self.params.values()):
            param.rebind(self.planes.one(index))

    @property
    def recipe(self) -> Recipe:
        """Their format."""
        return self.planes.recipe

    def keep_initial(self) -> None:
        """Keep values of every weight, so that all ranks do: those of its planes if it has none."""
        for param in self.params.values():
            if param.initial is None:
                param.initial = dequantise(param.planes, torch.bfloat16)

    def values(self) -> torch.Tensor:
        """bf16 values of all, flat, one after another: before quantisation where they are kept."""
        return torch.cat(
            [
                (dequantise(p.planes, torch.bfloat16) if p.initial is None else p.initial).view(-1)
                for p in self.params.values()
            ]
        )

    def requantise(self, values: torch.Tensor, history: History) -> None:
        """Fill all planes.

        Args:
            values: bf16, as `values` gives them.
            history: see `quantise`.
        """
        layout = self.planes.layout
        runs = plan_runs(whole_parts(layout.shapes, layout.data[:-1]), layout)
        quantise(values, runs, self.planes, history)

    def free_initial(self) -> None:
        """Let go of the values before quantisation."""
        for param in self.params.values():
            param.free_initial()


def group_by_recipe(params: Mapping[str, torch.Tensor]) -> tuple[QuantisedWeights, ...]:
    """The quantised ones among some weights, by recipe, in the order in which recipes appear."""
    groups: dict[Recipe, dict[str, QuantisedTensor]] = {}
    for name, param in params.items():
        if isinstance(param, QuantisedTensor):
            groups.setdefault(param.recipe, {})[name] = param
    return tuple(QuantisedWeights(members) for members in groups.values())
