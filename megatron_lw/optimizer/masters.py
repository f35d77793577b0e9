"""The fp32 masters: one flat row a bucket on each rank, and nothing else.

A parameter's weight is always the master cast to the weight's dtype (DESIGN's rule for the bits);
the masters are seeded from the weights once, and again only when the caller says that the weights
are newer (`reload_model_params`).
"""

from __future__ import annotations

import torch

from megatron_lw.distributed.buffers import BucketBuffer


class MasterRow:
    """This rank's fp32 masters of one bucket.

    Attributes:
        bucket: weights and gradients of the bucket.
        row: fp32 `[row_length]`; padding is zero.
    """

    __slots__ = ("bucket", "row")

    def __init__(self, bucket: BucketBuffer) -> None:
        self.bucket = bucket
        length = bucket.layout.row_lengths[bucket.group.rank]
        self.row = torch.zeros(length, dtype=torch.float32, device=bucket.grads.device)
        self.seed()

    @torch.no_grad()
    def seed(self) -> None:
        """Set the masters from the weights."""
        for name, slot in self.bucket.row_slots():
            weight = self.bucket.params[name].detach().view(-1)
            part = weight[slot.param_start : slot.param_start + slot.numel]
            self.row[slot.row_start : slot.row_start + slot.numel].copy_(part)

    def gradient(self) -> torch.Tensor:
        """The reduced gradient row in fp32: the storage itself, or a copy of a bf16 row."""
        return self.bucket.grad_row.float()
