"""Hooks that a copied or pickled module leaves behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does nothing once its object is gone, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call


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
