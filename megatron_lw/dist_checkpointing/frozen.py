"""Frozen weights that are kept as FP8: their values, and their bytes and scales beside them.

Such a weight has no master from which it could be quantised anew, and its values alone do not give
its bytes. So a checkpoint holds both: the values in bf16, as of any frozen weight, and the tensors
of its planes under names of their own, `fp8/RECIPE/PART of PARTS/TENSOR/WEIGHT`. A load takes the
bytes where recipe and parts are the same, and quantises the values where they are not. A part is
what one tensor-parallel rank holds of the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_lw.fp8.kinds import planes_of, put_planes
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import dequantise, quantise_all
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.param_info import ParamInfo

PLANES = "fp8/"
"""What names of tensors of planes begin with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenWeight:
    """A frozen weight that is kept as FP8, as it is saved, or to be loaded into.

    Attributes:
        param: the weight.
        name: what the checkpoint calls its values.
        values: bf16, of the weight's shape; a copy.
        planes: a copy.
        part: which part of the weight this rank holds, and of how many.
    """

    param: nn.Parameter
    name: str
    values: torch.Tensor
    planes: Planes
    part: tuple[int, int]

    @classmethod
    def of(
        cls, name: str, info: ParamInfo, param: nn.Parameter, groups: ParallelGroups
    ) -> FrozenWeight:
        """Copy what a weight consists of.

        Args:
            name: what the checkpoint calls it.
            info: its facts.
            param: the weight.
            groups: say which part of it this rank holds.
        """
        planes, plane = planes_of(info.name, param)
        values = dequantise(planes, torch.bfloat16, plane)
        part = part_of(info, groups)
        return cls(param=param, name=name, values=values, planes=planes, part=part)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name in the checkpoint and tensor of everything that its planes consist of."""
        part, parts = self.part
        for key, tensor in self.planes.tensors().items():
            recipe = self.planes.recipe.label
            yield f"{PLANES}{recipe}/{part + 1} of {parts}/{key}/{self.name}", tensor

    @torch.no_grad()
    def adopt(self, read: Collection[str]) -> None:
        """Make the weight what was read: bytes if there were any, else values, quantised.

        Args:
            read: names of the saved tensors that were read.
        """
        if not all(name in read for name, _ in self.tensors()):
            quantise_all(self.values.view(-1), self.planes, "restart")
        put_planes(self.name, self.param, self.planes)


def weight_of(name: str) -> str:
    """The weight to which a tensor of planes belongs; any other name as it is."""
    return name.split("/", 4)[-1] if name.startswith(PLANES) else name


def part_of(info: ParamInfo, groups: ParallelGroups) -> tuple[int, int]:
    """Which part of a weight this rank quantises with a scale of its own, and of how many."""
    part, parts = 0, 1
    if info.ep_size > 1:
        part, parts = groups.ep.rank, info.ep_size
    if info.tp_dim is not None:
        tensor = groups.domain(info.domain).tensor
        part, parts = part * tensor.size + tensor.rank, parts * tensor.size
    return part, parts
