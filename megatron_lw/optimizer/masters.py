"""The fp32 masters: one flat row a bucket on each rank, and nothing else.

A parameter's weight is always the master cast to the weight's dtype (DESIGN's rule for the bits);
the masters are seeded from the weights once, and again only when the caller says that the weights
are newer (`reload_model_params`).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.errors import NonFiniteError


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
        """Set the masters from the weights.

        Quantised weights give the values before quantisation, while those are kept, and let go of
        them; else those of their planes. They are quantised anew, as from the masters.
        """
        values: dict[str, torch.Tensor] = {}
        for group in self.bucket.quantised:
            flat, starts = group.values(), group.planes.layout.data
            group.quantise(flat, "keep")
            group.deliver()
            group.free_initial()
            parts = (flat[low:high] for low, high in pairwise(starts))
            values |= dict(zip(group.params, parts, strict=True))
        for name, slot in self.bucket.row_slots():
            weight = values[name] if name in values else self.bucket.params[name].detach().view(-1)
            part = weight[slot.param_start : slot.param_start + slot.numel]
            self.row[slot.row_start : slot.row_start + slot.numel].copy_(part)

    def require_finite(self) -> None:
        """Check the masters of quantised weights, in which a bad number would spoil a whole block.

        Raises:
            NonFiniteError: one is not finite; names the parameter.
        """
        if not self.bucket.quantised or bool(self.row.isfinite().all()):
            return
        for name, slot in self.bucket.row_slots():
            if not self.row[slot.row_start : slot.row_start + slot.numel].isfinite().all():
                raise NonFiniteError(
                    f"a master of parameter {name!r} is not finite, in a bucket that is quantised; "
                    "lower the learning rate and load a checkpoint"
                )

    def gradient(self) -> torch.Tensor:
        """The reduced gradient row in fp32: the storage itself, or a copy of a bf16 row."""
        return self.bucket.grad_row.float()
