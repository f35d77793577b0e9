"""`QuantisedWeights`: the weights of a bucket that share a recipe, their planes side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_lw.fp8 import rules
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import History, dequantise, quantise_all
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.te import (
    move_data,
    read_planes,
    recipe_of,
    take_initial,
    write_planes,
)
from megatron_lw.fp8.te_buffers import buffers
from megatron_lw.fp8.tensor import QuantisedTensor

_MAGNITUDE = 0x7F
"""The bits of an E4M3 byte without its sign."""


class QuantisedWeights:
    """Quantised weights that are worked on in one call.

    Building it moves their planes into common storage, once; addresses never change afterwards.

    Args:
        params: global name -> weight, all of one recipe, in the order in which they lie.

    Attributes:
        params: the same.
        planes: of all of them, one matrix a weight, in that order.
    """

    params: Mapping[str, torch.Tensor]

    def __init__(self, params: Mapping[str, QuantisedTensor]) -> None:
        self.params = self._own = dict(params)
        self.planes = _planes_for(self.params, next(iter(params.values())).recipe)
        for index, param in enumerate(self._own.values()):
            param.rebind(self.planes.one(index))

    @property
    def recipe(self) -> Recipe:
        """Their format."""
        return self.planes.recipe

    def keep_initial(self) -> None:
        """Keep values of every weight, so that all ranks do: those of its planes if it has none."""
        for param in self._own.values():
            if param.initial is None:
                param.initial = dequantise(param.planes, torch.bfloat16)

    def initial_values(self) -> list[torch.Tensor]:
        """What weights were before they were quantised, where that is kept. Aliases it."""
        return [param.initial for param in self._own.values() if param.initial is not None]

    def values(self) -> torch.Tensor:
        """bf16 values of all, flat, one after another: before quantisation where they are kept."""
        return torch.cat(
            [
                (dequantise(p.planes, torch.bfloat16) if p.initial is None else p.initial).view(-1)
                for p in self._own.values()
            ]
        )

    def quantise(self, values: torch.Tensor, history: History) -> None:
        """Fill all planes; `deliver` brings them to the weights.

        Args:
            values: bf16, as `values` gives them.
            history: see `quantise`.
        """
        quantise_all(values, self.planes, history)

    def deliver(self) -> None:
        """Nothing to do: the weights consist of these planes."""

    def tensors(self) -> list[torch.Tensor]:
        """All of which the weights consist, in as few tensors as hold it. Aliases it."""
        return list(self.planes.tensors().values())

    def held(self, index: int) -> Planes:
        """What the weight of an index consists of at this moment."""
        return self.planes.one(index)

    def free_initial(self) -> None:
        """Let go of the values before quantisation."""
        for param in self._own.values():
            param.free_initial()


class TransformerEngineWeights(QuantisedWeights):
    """The same of tensors of Transformer Engine, whose bytes are views of these planes.

    Building it moves them there, once. Scales are small, and Transformer Engine pads them: it keeps
    its own, and `deliver` copies them; and bytes too where a buffer is none of these views, because
    Transformer Engine or a user has replaced it since, or the view would not be aligned. Of a
    weight that keeps one plane the other is here alone: wire and arithmetic need it.

    Args:
        params: global name -> weight, all of one recipe, in the order in which they lie.
        recipe: that recipe.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], recipe: Recipe) -> None:
        self.params = dict(params)
        self.planes = _planes_for(self.params, recipe)
        for index, (name, param) in enumerate(self.params.items()):
            move_data(name, param, self.planes.one(index))
        self._initial: dict[str, torch.Tensor] = {}

    def keep_initial(self) -> None:
        """Take them from Transformer Engine, which lets go of them: those of a plane if none."""
        self._initial = {name: take_initial(name, param) for name, param in self.params.items()}

    def initial_values(self) -> list[torch.Tensor]:
        """What weights were before they were quantised, where that is kept. Aliases it."""
        return list(self._initial.values())

    def values(self) -> torch.Tensor:
        """As above. A weight that is not what its history of maxima gives starts a new one."""
        found = []
        for index, (name, param) in enumerate(self.params.items()):
            values = self._initial[name] if self._initial else take_initial(name, param)
            found.append(values.reshape(-1))
            history = self.planes.one(index).history
            if history is not None and (self._initial or not _follows(history, self.held(index))):
                history.zero_()
                history[0, 0] = rules.largest(rules.magnitudes(values).amax().view(1))[0]
        return torch.cat(found)

    def deliver(self) -> None:
        """Bring Transformer Engine's buffers up to date, of all weights in one call."""
        write_planes(self.params, self.planes)

    def tensors(self) -> list[torch.Tensor]:
        """Transformer Engine's buffers, and the histories of maxima, which are ours."""
        found = [
            tensor
            for name, param in self.params.items()
            for tensor in buffers(name, param, self.recipe).values()
        ]
        return found if self.planes.history is None else [*found, self.planes.history]

    def held(self, index: int) -> Planes:
        """A copy of what the weight consists of; a plane that it does not keep is ours."""
        ours = self.planes.one(index)
        made = ours.with_tensors({name: each.clone() for name, each in ours.tensors().items()})
        read_planes(*list(self.params.items())[index], made)
        return made

    def free_initial(self) -> None:
        """Let go of the values before quantisation."""
        self._initial = {}


def _follows(history: torch.Tensor, held: Planes) -> bool:
    """Whether scale and largest byte of a matrix are those that its history of maxima gives.

    Whoever writes into a weight of Transformer Engine does not know the history.

    Args:
        history: fp32 `[1, 1 + history]`.
        held: what the matrix consists of.
    """
    largest = Planes.empty([(1, 1)], held.recipe, history.device)
    largest = largest.with_tensors(largest.tensors() | {"history": history})
    quantise_all(history[:, 0].clone(), largest, "keep")
    pairs = [(held.row_data, held.row_scale), (held.col_data, held.col_scale)]
    return all(
        torch.equal(scale, largest.row_scale)
        and torch.equal((data & _MAGNITUDE).amax().view(1), largest.row_data)
        for data, scale in pairs
    )


def _planes_for(params: Mapping[str, torch.Tensor], recipe: Recipe) -> Planes:
    shapes = [(param.shape[0], param.shape[1]) for param in params.values()]
    return Planes.empty(shapes, recipe, next(iter(params.values())).device)


def group_by_recipe(params: Mapping[str, torch.Tensor]) -> tuple[QuantisedWeights, ...]:
    """The quantised ones among some weights, by recipe: ours, then Transformer Engine's."""
    ours: dict[Recipe, dict[str, QuantisedTensor]] = {}
    theirs: dict[Recipe, dict[str, torch.Tensor]] = {}
    for name, param in params.items():
        if isinstance(param, QuantisedTensor):
            ours.setdefault(param.recipe, {})[name] = param
            continue
        recipe = recipe_of(name, param)
        if recipe is not None:
            theirs.setdefault(recipe, {})[name] = param
    return (
        *(QuantisedWeights(members) for members in ours.values()),
        *(TransformerEngineWeights(members, recipe) for recipe, members in theirs.items()),
    )
