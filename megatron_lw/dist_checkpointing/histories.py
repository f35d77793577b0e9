"""Histories of maxima as entries of a checkpoint: what delayed scales of FP8 weights follow from.

The scale of a delayed weight follows from the maxima of its past updates, so these are part of what
the weight is: without them a load would give other bytes. A history is a logical tensor
`[parts, length]`, the newest maximum first. A part is what one tensor-parallel rank holds of the
weight, since each such rank quantises its part with a scale of its own; most weights have one. The
maximum of the present values is not saved: a load finds it anew in the masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_lw.dist_checkpointing.entries import Entry, identity
from megatron_lw.dist_checkpointing.frozen import part_of
from megatron_lw.dist_checkpointing.manifest import HISTORY
from megatron_lw.optimizer.boxes import Box

if TYPE_CHECKING:
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


def history_entries(optimizer: LayerWiseDistributedOptimizer) -> tuple[Entry, ...]:
    """Histories of the stepped weights that this rank holds a part of; views, no communication.

    Any rank may hold a copy; who writes one is agreed on at save.
    """
    return tuple(_entries(optimizer))


def _entries(optimizer: LayerWiseDistributedOptimizer) -> Iterator[Entry]:
    runtime = optimizer.runtime
    infos = {route.info.name: route.info for route in runtime.routing.routes}
    for publisher in runtime.publishers:
        for group in publisher.bucket.quantised:
            for index, name in enumerate(group.params):
                history = group.planes.one(index).history
                if history is None:
                    continue
                past = history[:, 1:]
                part, parts = part_of(infos[name], optimizer.groups)
                yield Entry(
                    name=identity(infos[name]),
                    state=HISTORY,
                    shape=(parts, past.shape[1]),
                    box=Box((part, 0), (1, past.shape[1])),
                    tensor=past,
                    copies=(),
                    writes=False,
                )
