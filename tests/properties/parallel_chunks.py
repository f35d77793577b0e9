"""A model chunk of a case: parameters in modules, outside of modules, and used from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_lw import fp8
from tests.properties.parallel_models import Spec
from tests.properties.parallel_shares import checksum


class Cell(nn.Module):
    """One parameter with a forward of its own."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.weight = param

    def forward(self, use: Any) -> torch.Tensor:
        return use(self.weight)


class Table(nn.Embedding):
    """An embedding, recognised by its class."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(*param.shape, _weight=param.detach())
        self.weight = param

    def forward(self, use: Any) -> torch.Tensor:
        return use(self.weight)


class Chunk(nn.Module):
    """A model chunk: parameters in modules, outside of modules, and used from outside."""

    def __init__(self, params: dict[str, nn.Parameter], specs: dict[str, Spec]) -> None:
        super().__init__()
        self.specs = specs
        self.cells = nn.ModuleDict()
        self.loose = nn.ParameterDict()
        for name, param in params.items():
            if specs[name].kind == "table":
                self.cells[name] = Table(param)
            elif specs[name].use == "loose":
                self.loose[name] = param
            else:
                self.cells[name] = Cell(param)

    def forward(self, order: list[str], grads: dict[str, torch.Tensor]) -> Any:
        """The loss that has these gradients, and checksums of the weights that it read."""
        loss, seen = torch.zeros(()), {}
        for name in order:

            def use(weight: torch.Tensor, name: str = name) -> torch.Tensor:
                seen[name] = checksum(weight)
                if name not in grads:
                    return torch.zeros(())
                if self.specs[name].use == "twice":
                    half = grads[name] / 2
                    return (plain(weight) * half).sum() + (plain(weight) * half).sum()
                return (plain(weight) * grads[name]).sum()

            if name in self.loose:
                loss = loss + use(self.loose[name])
            elif self.specs[name].use == "borrowed":
                loss = loss + use(self.cells[name].weight)
            else:
                loss = loss + self.cells[name](use)
        return loss, seen


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The values in fp32; of a quantised weight by either way that autograd knows."""
    if not isinstance(weight, fp8.QuantisedTensor):
        return weight.float()
    if weight.shape[0] % 2:
        return weight.dequantize().float()
    unit = torch.eye(weight.shape[1], dtype=torch.bfloat16)
    return nn.functional.linear(unit, weight).t().float()
