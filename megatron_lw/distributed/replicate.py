"""Making replicas equal, once, at construction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import broadcast
from megatron_lw.fp8.kinds import forget_initial, is_quantised, stored
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.describe import buffer_domain, frozen_domain
from megatron_lw.optimizer.names import natural_key


def replicate(module: nn.Module, buckets: Sequence[BucketBuffer], groups: ParallelGroups) -> None:
    """Set every parameter and buffer to what the first rank of its group has.

    Args:
        module: the bare module.
        buckets: storage of its trainable parameters.
        groups: where copies are.

    Collective: one broadcast a bucket over its reduce group (and over `groups.embedding` for a tied
    one), then one a frozen parameter or buffer, by name, over the reduce group of its domain.
    """
    for bucket in buckets:
        for tensor in [*bucket.weight_tensors(), *bucket.initial_values()]:
            broadcast(tensor, bucket.group)
            if bucket.tied:
                broadcast(tensor, groups.embedding)
    managed = {id(param) for bucket in buckets for param in bucket.params.values()}
    rest = [
        (label, tensor, frozen_domain(param))
        for name, param in module.named_parameters()
        if id(param) not in managed
        for label, tensor in stored(name, param).items()
    ]
    for param in module.parameters():
        if id(param) not in managed and is_quantised(param):
            forget_initial(param)
    domain = buffer_domain(groups)
    rest += [(name, buffer, domain) for name, buffer in module.named_buffers()]
    for _, tensor, domain in sorted(rest, key=lambda entry: natural_key(entry[0])):
        broadcast(tensor, groups.domain(domain).reduce)
