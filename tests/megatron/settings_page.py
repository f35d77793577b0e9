"""Writes the tables of `docs/from-megatron.md` anew, from the installed Megatron.

    make megatron-page

A field that the tables of the package do not know stops it, by name: say there what becomes of it.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/from-megatron.md"
_TABLE = re.compile(r"^\| field \| here \|.*\n(?:\|.*\n?)+", re.MULTILINE)


def renewed(page: str, tables: str) -> str:
    """The page with these tables in place of its own, which must be as many."""
    new = _TABLE.findall(tables)
    old = _TABLE.findall(page)
    if len(old) != len(new):
        raise ValueError(f"{PAGE.name} has {len(old)} tables of settings, not {len(new)}")
    found = iter(new)
    return _TABLE.sub(lambda _: next(found).rstrip("\n") + "\n", page)


def main() -> None:
    """Renew the page."""
    warnings.simplefilter("ignore")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from tests.megatron import cuda_on_cpu

    cuda_on_cpu.install()
    from tests.megatron.settings_cases import table

    PAGE.write_text(renewed(PAGE.read_text(), table()))


if __name__ == "__main__":
    main()
