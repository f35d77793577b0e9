"""Global parameter names: how they are made and in which order they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_lw.errors import ConfigError

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sort key with `layers.2` before `layers.10`; a total order, ties by the name."""
    parts = _DIGITS.split(name)
    # The split alternates text and digits, so that equal positions always compare equal types.
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name


@dataclass(frozen=True, slots=True)
class NameMap:
    """Turns the name of a parameter inside one model chunk into its global name.

    Attributes:
        rule: `(chunk index, local name) -> global name`, or a mapping from local name to global
            name for models of one chunk; None: names are already global.
    """

    rule: Callable[[int, str], str] | Mapping[str, str] | None = None

    def to_global(self, chunk: int, local_name: str) -> str:
        """The global name of a parameter.

        Raises:
            ConfigError: the mapping does not know the name.
        """
        if self.rule is None:
            return local_name
        if isinstance(self.rule, Mapping):
            if local_name not in self.rule:
                raise ConfigError(f"the NameMap has no global name for parameter {local_name!r}")
            return self.rule[local_name]
        return self.rule(chunk, local_name)

    @classmethod
    def with_layer_offsets(cls, list_name: str, offsets: Mapping[int, int]) -> NameMap:
        """Shift the layer numbers of `list_name` ("layers.3.w" -> "layers.11.w") by chunk.

        Args:
            list_name: name of the `ModuleList` whose entries are numbered from 0 on each stage.
            offsets: chunk index -> global number of its first layer.
        """
        pattern = re.compile(rf"(^|\.){re.escape(list_name)}\.(\d+)(?=\.)")

        def shift(chunk: int, name: str) -> str:
            if chunk not in offsets:
                raise ConfigError(f"the NameMap has no layer offset for chunk {chunk}")
            return pattern.sub(
                lambda m: f"{m[1]}{list_name}.{int(m[2]) + offsets[chunk]}", name, count=1
            )

        return cls(shift)
