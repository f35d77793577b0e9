"""What a collective returns, and how it is named when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lw.distributed.group import Group
from megatron_lw.errors import CommunicationError


class Handle:
    """A collective that may still be under way. `wait` makes its result usable; twice is once.

    Args:
        work: torch's handle; None if there is nothing to wait for.
        what: what the collective does, for the message if it fails.
    """

    __slots__ = ("_what", "_work")

    def __init__(self, work: Any | None = None, what: str = "") -> None:
        self._work = work
        self._what = what

    @property
    def outstanding(self) -> bool:
        """Whether it has not been waited for, or has failed."""
        return self._work is not None

    def wait(self) -> None:
        """Block (on GPU: the current stream) until the result is there.

        Raises:
            CommunicationError: the collective failed or timed out.
        """
        if self._work is not None:
            with named(self._what):
                self._work.wait()
            self._work = None


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say which collective failed, and what that means.

    Raises:
        CommunicationError: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"{what} failed: another rank is dead, stuck or makes other calls ({error})"
        ) from error


def describe(collective: str, group: Group, label: str) -> str:
    """What a collective does over which group, for messages."""
    return f"{collective} over group {group.name!r}{f' ({label})' if label else ''}"
