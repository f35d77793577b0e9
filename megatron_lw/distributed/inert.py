"""Hooks that a copied or pickled module leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that holds the library's objects, and holds nothing in copies and pickles.

    A deep copy of a wrapped model (an average of weights, say) is a plain module: its hooks do
    nothing.
    """

    __slots__ = ("_action",)

    def __init__(self, action: Callable[..., None] | None = None) -> None:
        self._action = action

    def __call__(self, *args: Any) -> None:
        """Do what the hook is for."""
        if self._action is not None:
            self._action(*args)

    def __deepcopy__(self, memo: object) -> Hook:
        """The copy does nothing."""
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        """Neither does what is unpickled."""
        return Hook, ()
