"""Gradients to their rows: one collective a bucket, then the average.

By default it is a reduce-scatter that sums, and the sum is divided afterwards, on the row alone:
integer-valued gradients then give the same bits on any number of ranks, and only 1/D of the
elements is touched. Two settings change how the sum is made: `average_in_collective` lets the
collective average, and `reduce_scatter_with_fp32_accumulation` sends half-precision rows to their
ranks and sums them in fp32 there.
"""

from __future__ import annotations

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import ReduceOp, all_to_all, reduce_scatter_rows


def start_reduce(bucket: BucketBuffer, *, async_op: bool = False) -> None:
    """Send the bucket's gradients to their rows.

    A bucket whose state does not allow it is sent as well, since other ranks wait for it;
    `finish_reduce` then raises.

    Collective: reduce-scatter over `bucket.group`, or an all-to-all where sums are made in fp32.
    """
    try:
        bucket.begin_reduce()
    except Exception as error:
        bucket.failure = error
    label = f"reduce {bucket.label}"
    if bucket.fp32_sums is not None:
        splits = [bucket.grad_row.numel()] * bucket.group.size
        bucket.handle = all_to_all(
            bucket.fp32_sums,
            bucket.grads,
            splits,
            splits,
            bucket.group,
            async_op=async_op,
            label=label,
        )
        return
    op: ReduceOp = "avg" if bucket.average_in_collective else "sum"
    bucket.handle = reduce_scatter_rows(
        bucket.grads, bucket.group, op, async_op=async_op, label=label
    )


def finish_reduce(bucket: BucketBuffer, divisor: float | None = None) -> None:
    """Wait for the bucket's reduce and average the row.

    After it the bucket is REDUCED and `bucket.grad_row` holds the mean gradient.

    Args:
        bucket: the bucket.
        divisor: what the sum is divided by; the bucket's own divisor if None.

    Raises:
        StateError: the gradients were reduced or spent already when the reduce was started.
    """
    bucket.end_reduce()
    row = bucket.grad_row
    if bucket.fp32_sums is not None:
        row.copy_(bucket.fp32_sums.view(bucket.group.size, -1).float().sum(0))
    divisor = bucket.divisor if divisor is None else divisor
    if bucket.average_in_collective:
        divisor /= bucket.group.size
    if divisor != 1:
        row.div_(divisor)
