"""What may change masters between the children and the publishing of weights."""

from __future__ import annotations

from typing import Protocol

from megatron_lw.distributed.agreement import Kept


class WeightRule(Protocol):
    """A change of masters that every rank makes in every step that is not skipped.

    Attributes:
        name: of the stage.
    """

    name: str

    def apply(self, kept: Kept) -> None:
        """Change masters; collectives in it are made by every rank, whatever has failed.

        Args:
            kept: takes a failure of this rank, so that the others do not wait.
        """
