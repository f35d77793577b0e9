"""Gradients to their rows: one reduce-scatter a bucket, then the average.

The sum is divided after the reduction, on the row alone: integer-valued gradients then give the
same bits on any number of ranks, and only 1/D of the elements is touched.
"""

from __future__ import annotations

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import reduce_scatter_rows


def start_reduce(bucket: BucketBuffer, *, async_op: bool = False) -> None:
    """Send the bucket's gradients to their rows.

    Collective: reduce-scatter (sum) over `bucket.group`.
    """
    bucket.begin_reduce()
    bucket.handle = reduce_scatter_rows(
        bucket.grads, bucket.group, async_op=async_op, label=f"reduce {bucket.label}"
    )


def finish_reduce(bucket: BucketBuffer, divisor: float | None = None) -> None:
    """Wait for the bucket's reduce and average the row.

    After it the bucket is REDUCED and `bucket.grad_row` holds the mean gradient.

    Args:
        bucket: the bucket.
        divisor: what the sum is divided by; the bucket's own divisor if None.
    """
    bucket.end_reduce()
    divisor = bucket.divisor if divisor is None else divisor
    if divisor != 1:
        bucket.grad_row.div_(divisor)
