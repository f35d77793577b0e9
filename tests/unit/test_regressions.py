"""Every public report has a test named for it, or a row that names the test which shows it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit import doc_names
from tests.unit.doc_blocks import ROOT

FOLDER = ROOT / "tests/regressions"
MOST_ROWS = 15
ENTRIES = {
    "A": "1 3 4 5 7 8 10 11 12 13 14 16 18 19",
    "B": "1 2 4 6 7 9 10 11 13 14",
    "C": "1 2 3 4 5 6 8 10 12 13 15 16 17 19",
    "D": "1 3 4 5 6 7 9 11 13",
    "E": "1 2 4 5 8 9 10 12 13 14 16 17",
    "F": "1 2 3 5 7 8 10 11 13 14 17 19 20 21 22 23 26",
    "G": "1 2 3 4 5 6 7 8",
}
# 73 reports, of which C2 to C4 and C5 to C6 share an input; and eight of G.
LABELS = [letter + number for letter, numbers in ENTRIES.items() for number in numbers.split()]


def leading(words: list[str]) -> list[str]:
    """The entries at the head of a name."""
    found = []
    for word in words:
        if not re.fullmatch(r"[a-g]\d+", word):
            break
        found.append(word.upper())
    return found


def named_tests() -> dict[str, list[str]]:
    """Entry -> the tests that are named for it."""
    found: dict[str, list[str]] = {}
    for path in [*sorted(FOLDER.glob("test_*.py")), *sorted((ROOT / "tests/gpu").glob("*.py"))]:
        in_file = leading(path.stem.split("_")[::-1])
        for name in re.findall(r"^def test_(\w+)\(", path.read_text(), re.MULTILINE):
            for entry in [*leading(name.split("_")), *in_file]:
                found.setdefault(entry, []).append(f"{path.name}::test_{name}")
    return found


def rows() -> dict[str, str]:
    """Entry -> the last cell of its row in the table."""
    found: dict[str, str] = {}
    for line in (FOLDER / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[A-G]\d+", cells[0]):
            assert cells[0] not in found, f"two rows for {cells[0]}"
            found[cells[0]] = cells[-1]
    return found


def test_every_entry_has_tests_or_a_row_and_not_both() -> None:
    named, listed = named_tests(), rows()
    assert len(LABELS) == len(set(LABELS)) == 76 + 8
    assert [entry for entry in LABELS if entry not in named and entry not in listed] == []
    assert sorted(named.keys() & listed.keys()) == []
    assert sorted((named.keys() | listed.keys()) - set(LABELS)) == []


def test_few_entries_are_rows_and_each_names_tests_that_exist() -> None:
    assert len(rows()) <= MOST_ROWS
    for entry, cell in rows().items():
        tests = re.findall(r"`([^`]+::test_\w+)`", cell)
        assert tests, entry
        for test in tests:
            assert doc_names.path_exists(test), (entry, test)
            assert Path(test.partition("::")[0]).parts[1] != "regressions", entry
