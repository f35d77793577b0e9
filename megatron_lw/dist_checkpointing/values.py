"""Values that are not tensors, as JSON that keeps their types."""

from __future__ import annotations

from typing import TypeAlias

Encoded: TypeAlias = "None | bool | int | float | str | list[Encoded] | dict[str, Encoded]"
"""A JSON tree."""
