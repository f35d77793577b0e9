"""What a step works with, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.gather import Publisher
from megatron_lw.groups import Domain
from megatron_lw.optimizer.children.base import Child
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
