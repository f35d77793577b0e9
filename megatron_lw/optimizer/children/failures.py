"""A failure of a computation is kept until the exchanges of the step are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lw.errors import CommunicationError, StateError


class FirstFailure:
    """The first failure of a step: other ranks wait for our exchanges, so it is raised last."""

    def __init__(self) -> None:
        self._error: StateError | None = None

    @contextmanager
    def kept(self, label: str) -> Iterator[None]:
        """Keep an exception of the block, unless communication itself has failed.

        Args:
            label: of the bucket, for the message.
        """
        try:
            yield
        except CommunicationError:
            raise
        except Exception as error:
            failure = StateError(f"{label}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._error = self._error or failure

    def raise_and_forget(self) -> None:
        """Raise what was kept.

        Raises:
            StateError: a block has failed since the last call.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
