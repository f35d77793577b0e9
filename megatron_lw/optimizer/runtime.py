"""What a step works with, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.gather import Publisher
from megatron_lw.groups import Domain
from megatron_lw.optimizer.children.base import Child, ParamGroup
from megatron_lw.optimizer.children.matrix import MatrixChild
from megatron_lw.optimizer.describe import DescribedModel
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.routing import Routing
from megatron_lw.optimizer.stats import CountedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Everything a step works with, on this rank.

    Attributes:
        model: facts and parameters.
        routing: child and group of each parameter.
        plans: domain -> ownership plan, for domains that have parameters.
        buckets: all buckets, dense first, in the order in which backward completes them.
        children: the child optimizers, in the order in which they step.
        publishers: one for each bucket.
        counted: what this rank counts in the statistics.
        device: where the parameters are.
    """

    model: DescribedModel
    routing: Routing
    plans: Mapping[Domain, OwnershipPlan]
    buckets: tuple[BucketBuffer, ...]
    children: tuple[Child, ...]
    publishers: tuple[Publisher, ...]
    counted: tuple[CountedRun, ...]
    device: torch.device

    def require_finite(self, kept: Kept) -> None:
        """Check the masters of quantised weights; keeps what `MasterRow.require_finite` raises."""
        with kept.keeping("before publishing"):
            for publisher in self.publishers:
                publisher.master.require_finite()

    @property
    def matrix_children(self) -> tuple[MatrixChild, ...]:
        """The children that step whole matrices."""
        return tuple(child for child in self.children if isinstance(child, MatrixChild))

    def record_scales(
        self, param_groups: Sequence[ParamGroup], state: MutableMapping[Any, Any]
    ) -> None:
        """Have the matrix children take their scales anew; `state[name]["lr_ratio"]` records them.

        Nothing reads what is recorded.

        Args:
            param_groups: with their present settings.
            state: of the optimizer; an entry is a dictionary.
        """
        settings = {group["name"]: group for group in param_groups}
        for child in self.matrix_children:
            child.record(settings)
            for name, ratio in child.lr_ratios.items():
                state[name]["lr_ratio"] = ratio
