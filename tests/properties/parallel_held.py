"""What each rank must hold, made from the masters that the ranks have reported."""

from __future__ import annotations

import math

import torch

from megatron_lw import fp8
from tests.distributed.fp8_cases import RECIPES
from tests.properties.parallel_models import Case, Spec
from tests.properties.parallel_shares import (
    dtype_of,
    holds,
    initial,
    part_of,
    place_of,
    whole_of,
)

Masters = dict[tuple[str, int], torch.Tensor]


class Held:
    """What each rank must hold: local masters, and quantised weights made of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.masters = {
            (spec.name, rank): part_of(case, spec, initial(case, spec), place_of(case, rank))
            for spec in case.specs
            for rank in range(case.ranks)
            if holds(spec, place_of(case, rank))
        }
        self._quantise()

    def _quantise(self) -> None:
        self.quantised = {
            (spec.name, rank): fp8.QuantisedTensor.from_values(
                self.masters[spec.name, rank].bfloat16(), RECIPES[spec.recipe]
            )
            for spec in self.case.specs
            for rank in range(self.case.ranks)
            if spec.recipe is not None and holds(spec, place_of(self.case, rank))
        }

    def turn_to(self, case: Case) -> None:
        """The same parameters in another topology, after a load."""
        whole = {
            s.name: without_padding(s, whole_of(self.case, s, self.masters))
            for s in self.case.specs
        }
        self.case = case
        self.masters = {
            (spec.name, rank): part_of(case, spec, whole[spec.name], place_of(case, rank))
            for spec in case.specs
            for rank in range(case.ranks)
            if holds(spec, place_of(case, rank))
        }
        self._quantise()

    def update(self, masters: Masters, *, success: bool, loaded: bool) -> None:
        """Take new masters; those of a step that was not taken are the old ones."""
        specs = {spec.name: spec for spec in self.case.specs}
        for (name, rank), master in masters.items():
            if not success:
                before = self.masters[name, rank]
                if loaded:
                    index = torch.arange(math.prod(specs[name].shape)).view(specs[name].shape)
                    index = part_of(self.case, specs[name], index, place_of(self.case, rank))
                    keep = without_padding(specs[name], torch.ones(specs[name].shape)).bool()
                    before = torch.where(keep.view(-1)[index], before, torch.zeros(()))
                assert torch.equal(master, before), (name, rank)
            elif (name, rank) in self.quantised:
                self.quantised[name, rank].requantise(master.bfloat16(), "advance")
        self.masters = {**self.masters, **masters}

    def weight(self, spec: Spec, rank: int) -> torch.Tensor:
        """The weight as a rank's forward must read it."""
        if spec.recipe is not None:
            return self.quantised[spec.name, rank]
        return self.masters[spec.name, rank].to(dtype_of(spec))


def without_padding(spec: Spec, whole: torch.Tensor) -> torch.Tensor:
    """The parameter with zeros in its rows of padding."""
    if "logical_rows" in spec.tag:
        whole = whole.clone()
        whole[spec.tag["logical_rows"] :] = 0.0
    return whole
