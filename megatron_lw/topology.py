"""A layout of ranks as sizes: what can be said of it without processes.

Rank order is that of `groups`: `rank = tp + T (dp + D pp)` for the dense part of a model, and
`rank = etp + ET (ep + E (edp + ED pp))` for the experts, which re-divide a pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lw.errors import ConfigError

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.([0-9]+)(?:\.|$)")
_EXPERT = re.compile(r"(?:^|\.)experts?\.([0-9]+)\.|\.(?:weight|bias)([0-9]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the parallel dimensions, as Megatron names them.

    Attributes:
        dp: Data parallel, context parallelism included.
        tp: Tensor parallel.
        ep: Expert parallel.
        pp: Pipeline parallel.
        etp: Expert tensor parallel.
    """

    dp: int
    tp: int
    ep: int
    pp: int
    etp: int

    def __post_init__(self) -> None:
        """Check that the sizes are positive and that the ranks of experts divide.

        Raises:
            ConfigError: If not; names the size.
        """
        sizes = {"dp": self.dp, "tp": self.tp, "ep": self.ep, "pp": self.pp, "etp": self.etp}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name}={value} is below 1: give a positive integer")
        if self.dp * self.tp % (self.ep * self.etp):
            raise ConfigError(
                f"dp * tp = {self.dp} * {self.tp} is not a multiple of ep * etp = "
                f"{self.ep} * {self.etp}: experts have dp * tp / (ep * etp) data-parallel ranks"
            )

    @property
    def expert_dp(self) -> int:
        """Data-parallel ranks of the experts."""
        return self.dp * self.tp // (self.ep * self.etp)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp

    def sizes_of(self, domain: str) -> tuple[int, int]:
        """Return the data-parallel and the tensor-parallel size of a domain."""
        if domain == "replicated":
            return self.dp * self.tp, 1
        return (self.expert_dp, self.etp) if domain == "expert" else (self.dp, self.tp)

    def place(self, rank: int) -> RankPlace:
        """Return where a global rank stands."""
        stage, within = divmod(rank, self.dp * self.tp)
        expert_row, expert = divmod(within, self.etp * self.ep)
        return RankPlace(
            rank=rank,
            stage=stage,
            within=within,
            row=within // self.tp,
            tp=within % self.tp,
            expert_row=expert_row,
            ep=expert // self.etp,
            etp=expert % self.etp,
        )

    def group_sizes(self) -> dict[str, int]:
        """Return the sizes of all groups of `ParallelGroups`, the largest where ranks differ."""
        stage = self.dp * self.tp
        return {
            "world": self.world,
            "dp": self.dp,
            "expert_dp": self.expert_dp,
            "tp": self.tp,
            "expert_tp": self.etp,
            "ep": self.ep,
            "cp": 1,
            "pp": self.pp,
            "tp_dp": stage,
            "expert_tp_dp": self.etp * self.expert_dp,
            "grad_stats": self.world,
            "embedding": min(self.pp, 2),
            "replicas": stage,
            "control": self.world,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank stands in each parallel dimension.

    Attributes:
        rank: Global rank.
        stage: Pipeline stage.
        within: Rank in the stage.
        row: Data-parallel rank.
        tp: Tensor-parallel rank.
        expert_row: Data-parallel rank of the experts.
        ep: Expert-parallel rank.
        etp: Expert-tensor-parallel rank.
    """

    rank: int
    stage: int
    within: int
    row: int
    tp: int
    expert_row: int
    ep: int
    etp: int

    def of_domain(self, domain: str) -> tuple[int, int]:
        """Return the row of this rank and its tensor-parallel rank in a domain."""
        if domain == "replicated":
            return self.within, 0
        return (self.expert_row, self.etp) if domain == "expert" else (self.row, self.tp)


def layer_of(name: str) -> int | None:
    """Return the layer of a parameter, read from its name (`layers.N`); None outside of layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def expert_of(name: str) -> int | None:
    """Return the expert of a parameter, read from its name (`experts.N.`, `.weightN`)."""
    found = _EXPERT.search(name)
    return int(found[1] or found[2]) if found else None


def divide_layers(layers: Iterable[int], pp: int) -> dict[int, int]:
    """Return the pipeline stage of each layer: as even as possible, earlier stages first.

    Raises:
        ConfigError: If there are more stages than layers.
    """
    ordered = sorted(set(layers))
    if pp > max(1, len(ordered)):
        raise ConfigError(f"pp={pp} is more than the model's {len(ordered)} layers: lower it")
    size, larger = divmod(len(ordered), pp)
    sizes = [size + (stage < larger) for stage in range(pp)]
    stages = [stage for stage, number in enumerate(sizes) for _ in range(number)]
    return dict(zip(ordered, stages, strict=True))
