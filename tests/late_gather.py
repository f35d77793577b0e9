"""A gather that has not arrived until somebody waits for it: premature readers are found for sure.

gloo on one machine is mostly done before anyone looks, so that a missing wait would go unnoticed.
"""

from __future__ import annotations

import torch

from megatron_lw.distributed.gather import Publisher


class LateGather:
    """Stands for the handle of a gather that is under way.

    What arrived is taken out of the buffer, which holds NaN until `wait` puts it back.

    Attributes:
        waited: how often somebody has waited.
    """

    def __init__(self, publisher: Publisher) -> None:
        publisher.handle.wait()
        self.waited = 0
        self._buffer = publisher.wire.buffer
        self._arrived = self._buffer.clone()
        self._buffer.view(torch.uint8).fill_(255)  # NaN in BF16 and FP32

    @classmethod
    def delay(cls, publishers: tuple[Publisher, ...]) -> list[LateGather]:
        """Delay every gather that is under way."""
        delayed = []
        for publisher in publishers:
            if publisher.outstanding:
                publisher.handle = handle = cls(publisher)
                delayed.append(handle)
        return delayed

    def wait(self) -> None:
        """Let it arrive."""
        self._buffer.copy_(self._arrived)
        self.waited += 1
