"""The code blocks of README and docs: how they are found, run, and their shown output renewed.

    python -m tests.unit.doc_blocks        # write anew what the `text` blocks show

A block stands between fences. `python` and `sh` blocks are run; a `text` block right after one is
what it prints, to the character. `python fragment` must compile. `console` shows an output that
differs from machine to machine, and a `text` block anywhere else is a picture.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lw.cli.main import main as megatron_lw_main
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests/regressions/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
INFOS = ("python", "python fragment", "sh", "text", "console")

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; `output` is the `text` block that follows with one blank line between."""

    page: Path
    line: int
    info: str
    text: str
    output: str | None

    @property
    def where(self) -> str:
        """Page and line, for messages and as the file name of tracebacks."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        """The file that the block says to be, in a comment on its first line; else empty."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named[1] if named else ""


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text() if text is None else text
    found = list(_FENCE.finditer(text))
    result = []
    for match, after in pairwise([*found, None]):
        shows = after and after[2] == "text" and not text[match.end() : after.start()].strip()
        result.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                info=match[2],
                text=match[3],
                output=after[3] if after and shows else None,
            )
        )
    return result


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def run_python(block: Block) -> str:
    """Run a block as a script of its own; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
    return shown.getvalue()


def run_megatron_lw(arguments: list[str]) -> str:
    """Run `megatron-lw` in this process; return what it prints, without blanks at line ends."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        status = megatron_lw_main(arguments)
    if status:
        raise RuntimeError(f"megatron-lw {shlex.join(arguments)} ended with status {status}")
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())


def run_on_ranks(script: str, world_size: int) -> list[str]:
    """Run a script that torchrun would start, on warm ranks; return what each prints."""
    return run_ranks(_run_as_rank, world_size, script)


def _run_as_rank(script: str) -> str:
    """The harness has made the process group, and closes it when every rank is done."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    return shown.getvalue()


def printed(block: Block) -> str:
    """What a block prints whose output a page shows."""
    if block.info == "python":
        return run_python(block)
    [line] = block.text.splitlines()
    command, *arguments = shlex.split(line)
    if command != "megatron-lw":
        raise ValueError(f"{block.where}: the output of {command} cannot be shown as `text`")
    return run_megatron_lw(arguments)


def renewed(page: Path) -> str:
    """A page with every shown output as it is now."""
    text = page.read_text()
    for number in range(len(blocks(page))):
        block = blocks(page, text)[number]
        if block.output is not None and block.info in ("python", "sh"):
            begin = [match.start(3) for match in _FENCE.finditer(text)][number + 1]
            text = text[:begin] + printed(block) + text[begin + len(block.output) :]
    return text


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(renewed(each))
