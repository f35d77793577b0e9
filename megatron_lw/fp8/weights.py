"""`QuantisedWeights`: the weights of a bucket that share a recipe, their planes side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_lw.fp8 import rules
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import History, dequantise, quantise_all
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.te import buffers, read_planes, recipe_of, take_initial, write_planes
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
    """The same of tensors of Transformer Engine, which keep buffers of their own.

    The planes here are what travels and is compared, and `deliver` copies them into those buffers.

    Args:
        params: global name -> weight, all of one recipe, in the order in which they lie.
        recipe: that recipe.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], recipe: Recipe) -> None:
        self.params = dict(params)
        self.planes = _planes_for(self.params, recipe)
        self._initial: dict[str, torch.Tensor] = {}

    def keep_initial(self) -> None:
        """Take them from Transformer Engine, which lets go of them: those of a plane if none."""
        self._initial = {name: take_initial(name, param) for name, param in self.params.items()}

    def initial_values(self) -> list[torch.Tensor]:
        """What weights were before they were quantised, where that is kept. Aliases it."""
        return list(self._initial.values())

    def values(self) -> torch.Tensor:
        """As above. A weight that was written into since starts a new history of maxima."""
        found = []
        for index, (name, param) in enumerate(self.params.items()):
            values = self._initial[name] if self._initial else take_initial(name, param)
            found.append(values.reshape(-1))
            history = self.planes.one(index).history
            if history is not None and (self._initial or self._written(index)):
                history.zero_()
                history[0, 0] = rules.largest(rules.magnitudes(values).amax().view(1))[0]
        return torch.cat(found)

    def deliver(self) -> None:
        """Copy bytes and scales into Transformer Engine's buffers, of all weights in one call."""
        write_planes(self.params, self.planes)

    def tensors(self) -> list[torch.Tensor]:
        """Transformer Engine's buffers, and the histories of maxima, which are ours."""
        found = [t for name, param in self.params.items() for t in buffers(name, param).values()]
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

    def _written(self, index: int) -> bool:
        """Whether a weight is no longer what was delivered."""
        both = (planes.tensors().values() for planes in (self.planes.one(index), self.held(index)))
        return not all(torch.equal(mine, theirs) for mine, theirs in zip(*both, strict=True))


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
