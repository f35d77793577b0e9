"""What happens to gradients between backward and step: reduce, the sums that cross groups, tokens.

Two kinds of parameter get gradients from ranks that their reduce group does not cover: one that is
replicated over tensor parallelism and used under sequence parallelism (each rank saw a part of the
tokens), and a tied embedding (first and last pipeline stage each saw one use of it). Rows of such
buckets lie alike on those ranks, so their sum is one all-reduce of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_lw.distributed import collectives
from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.buffers import GradState
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError
from megatron_lw.groups import ParallelGroups


def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ParallelGroups | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Finish the gradients of a step; the signature is that of Megatron's hook of this name.

    `optimizer.step` calls it if nobody has. A second call in one step does nothing, but raises
    again what the first has raised.

    Args:
        model: the wrapped chunks.
        num_tokens: int64 scalar: tokens that this rank's summed loss covers, as the last pipeline
            stage knows it. Gradients are then divided by the tokens of all ranks, instead of being
            averaged over the data-parallel ranks: the loss must be a sum over tokens.
        pg_collection: the groups; those that the chunks were wrapped with if None.
        force_all_reduce: refused if True: gradients live in rows.

    Collective: one reduce-scatter a bucket over its reduce group; with `num_tokens` a broadcast
    over `groups.pp` and an all-reduce over `groups.dp`; an all-reduce over `groups.tp` for each
    bucket with sequence-parallel parameters and over `groups.embedding` for a tied one.

    Raises:
        ConfigError: a chunk is not wrapped, or `force_all_reduce` is asked for.
        LayerWiseError: something failed on this rank; after all collectives, for which the others
            wait. `optimizer.step` then raises on every rank.
    """
    if force_all_reduce:
        raise ConfigError("force_all_reduce=True: gradients are reduced into rows; leave it False")
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    if len(chunks) != len(model):
        raise ConfigError("finalize_model_grads takes chunks wrapped in DistributedDataParallel")
    if not all(chunk.finalized for chunk in chunks):
        _finalize(chunks, num_tokens, pg_collection or chunks[0].groups)
    kept = Kept()
    for number, chunk in enumerate(chunks):
        with kept.keeping(f"chunk {number}"):
            chunk.kept.raise_kept()
    kept.raise_kept()


def meet_in_reduces(chunks: Sequence[DistributedDataParallel], control: Group) -> None:
    """Bring all ranks to the same reduces, in the midst of a step too.

    An overlapped backward starts reduces as gradients come. Where one did not come on some rank,
    others are ahead of it, and no collective on the same process groups may follow. Where any rank
    has started a reduce, all ranks start all of them, as the step would do next.

    Collective: an all-reduce (max) of one integer over `control`, if reduces overlap; then maybe
    the reduce-scatters of all buckets.
    """
    if not any(chunk.ddp_config.overlap_grad_reduce for chunk in chunks):
        return
    ahead = any(b.grad_state is GradState.REDUCING for chunk in chunks for b in chunk.buckets)
    begun = torch.tensor(int(ahead), dtype=torch.int32, device=collectives.host_device(control))
    collectives.all_reduce(begun, control, "max", label="reduces under way")
    if begun.item():
        for chunk in chunks:
            chunk.start_grad_sync()


def _finalize(
    chunks: Sequence[DistributedDataParallel],
    num_tokens: torch.Tensor | None,
    groups: ParallelGroups,
) -> None:
    """Make all collectives; what fails on this rank is kept in its chunk."""
    # First, since backward may have started more of them on one rank than on another, and the
    # calls of a group must come in one order.
    for chunk in chunks:
        chunk.start_grad_sync()
    divisor = None
    if num_tokens is not None:
        divisor = _all_tokens(num_tokens, groups, chunks[0].kept)
    for chunk in chunks:
        chunk.finish_grad_sync(divisor, keep=True)
    for chunk in chunks:
        _sum_over_tensor_parallel(chunk, groups.tp)
        _sum_over_stages(chunk, groups.embedding)
        chunk.finalized = True


def _all_tokens(num_tokens: torch.Tensor, groups: ParallelGroups, kept: Kept) -> float:
    """Tokens of all data-parallel ranks, as the last pipeline stage counts them; at least 1."""
    total = torch.zeros(1, dtype=torch.int64, device=collectives.host_device(groups.grad_stats))
    with kept.keeping("num_tokens"):
        total.copy_(num_tokens.detach().reshape(1))
    collectives.broadcast(total, groups.pp, source=groups.pp.size - 1)
    collectives.all_reduce(total, groups.dp, label="number of tokens")
    return float(max(1, int(total)))


def _sum_over_tensor_parallel(chunk: DistributedDataParallel, group: Group) -> None:
    """Sum the row parts of sequence-parallel parameters over the ranks that share the sequence.

    Tensor-parallel peers hold the same row, so either all or none of them have parts to sum.
    """
    if group.size == 1:
        return
    for bucket in chunk.buckets:
        parts = bucket.sequence_parallel_grads()
        if parts:
            sizes = [part.numel() for part in parts]
            together = bucket.grad_row[: sum(sizes)]  # travels if `cat` fails: others wait for it
            with chunk.kept.keeping(bucket.label):
                together = torch.cat(parts)
            collectives.all_reduce(together, group, label=f"sequence-parallel, {bucket.label}")
            with chunk.kept.keeping(bucket.label):
                torch._foreach_copy_(parts, together.split(sizes))


def _sum_over_stages(chunk: DistributedDataParallel, group: Group) -> None:
    """Sum the rows of tied weights over the stages that share them."""
    for bucket in chunk.buckets:
        if bucket.tied:
            collectives.all_reduce(bucket.grad_row, group, label=f"tied sum, {bucket.label}")
