"""Sizes on the command line: of layouts in ranks, of memory and files in bytes."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from types import MappingProxyType

_UNITS: Mapping[str, int] = MappingProxyType(
    {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "k": 1 << 10,
        "m": 1 << 20,
        "g": 1 << 30,
        "t": 1 << 40,
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
        "tib": 1 << 40,
    }
)


def add_layout_arguments(parser: ArgumentParser) -> None:
    """Add the sizes of a layout of ranks, and of its buckets."""
    for name, default, text in (
        ("dp", 1, "data-parallel ranks, context parallelism included"),
        ("tp", 1, "tensor-parallel ranks"),
        ("ep", 1, "expert-parallel ranks"),
        ("pp", 1, "pipeline stages"),
        ("etp", None, "expert-tensor-parallel ranks (default: as --tp)"),
        ("bucket-size", None, "soft minimum of a bucket in elements (default: by the planner)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB" (powers of ten), "512MiB" or "4G" (powers of two).

    Raises:
        ArgumentTypeError: It is none, or not positive.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ArgumentTypeError(f"{text!r} is no size: give one such as 512MiB or 5GB")
    return int(float(found[1]) * unit)


def human_size(nbytes: float) -> str:
    """A size with a unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
