"""README and docs: every block runs as written, every shown output is real, every name exists."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from tests.unit import doc_names
from tests.unit.doc_blocks import (
    INFOS,
    PAGES,
    ROOT,
    Block,
    blocks,
    printed,
    prose,
    run_megatron_lw,
    run_on_ranks,
    run_python,
)

BLOCKS = [block for page in PAGES for block in blocks(page)]
RENEW = "python -m tests.unit.doc_blocks writes the outputs anew"


def of(*infos: str) -> list[Block]:
    return [block for block in BLOCKS if block.info in infos]


def where(block: Block) -> str:
    return block.where


def below_root(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_pages_have_blocks_of_every_kind_and_no_other() -> None:
    assert {block.info for block in BLOCKS} == set(INFOS)


@pytest.mark.parametrize("block", of("python", "python fragment"), ids=where)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec")


@pytest.mark.parametrize("block", [b for b in of("python") if not b.file], ids=where)
def test_python_runs_and_prints_what_is_shown(block: Block) -> None:
    shown = run_python(block)
    assert block.output is None or shown == block.output, RENEW


@pytest.mark.parametrize("block", of("sh"), ids=where)
def test_shell_commands_exist_and_print_what_is_shown(block: Block) -> None:
    """`make` and the long example are not run here; `.ci/run` and its tests do that."""
    for line in block.text.splitlines():
        words = shlex.split(line)
        assert doc_names.command_exists(words), line
        if words[0] == "megatron-lw" and block.output is None:
            assert run_megatron_lw(words[1:])
    if block.output is not None:
        assert printed(block) == block.output, RENEW


def test_the_quickstart_runs_on_its_ranks_and_learns() -> None:
    """As printed, on as many ranks as the command beside it starts; rank 0 alone prints."""
    [script] = [block for block in of("python") if block.file]
    [command] = [b.text for b in of("sh") if b.page == script.page and script.file in b.text]
    ranks = int(shlex.split(command)[2])
    assert ranks > 1
    shown, *others = run_on_ranks(script.text, ranks)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", shown, re.MULTILINE)]
    assert len(losses) == 3 and others == [""] * (ranks - 1), shown
    assert losses[-1] < 0.1 * losses[0] < 0.1 * math.log(64)


@pytest.mark.parametrize("page", PAGES, ids=below_root)
def test_everything_in_backticks_exists(page: Path) -> None:
    spans = sorted(set(re.findall(r"`([^`\n]+)`", prose(page))))
    assert [span for span in spans if not doc_names.exists(span)] == []
    assert prose(page).count("`") % 2 == 0, "a span must not run over a line end"


@pytest.mark.parametrize(
    "span",
    [
        "optimizer/nowhere.py",
        "tests/unit/test_docs.py::test_nothing",
        "OptimizerConfig.learning_rate",
        "optimizer.steps()",
        "--no-such-flag",
        "make coffee",
        "megatron_lw.Muon",
        "torch.optim.Muons",
        '"no-such-choice"',
        "annotate(weight, outputs=True)",
        "no_such_setting=1",
        "UnknownClass",
    ],
)
def test_what_does_not_exist_is_found(span: str) -> None:
    assert not doc_names.exists(span)


@pytest.mark.parametrize("page", PAGES, ids=below_root)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        if name.startswith("https://"):
            assert name.split("/")[2] in ("keepachangelog.com", "semver.org"), target
            continue
        file = (page.parent / name) if name else page
        assert file.is_file(), target
        text = file.read_text() if file.suffix == ".md" else ""  # a picture has no titles
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in anchors, target


def test_the_reading_order_names_every_module() -> None:
    flow = (ROOT / "docs/flow.md").read_text()
    package = ROOT / "megatron_lw"
    modules = [p.relative_to(package).as_posix() for p in sorted(package.rglob("*.py"))]
    missing = [m for m in modules if "__init__" not in m and f"`{m}`" not in flow]
    assert missing == [], "docs/flow.md: give each a row in the table of the reading order"


def test_pages_are_plain_text() -> None:
    for page in PAGES:
        assert page.read_text().isascii(), page
        assert not re.search(r"[ \t]$", page.read_text(), re.MULTILINE), page
