"""The list of faults fits the source: one that fits nothing would be found out too late."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron_lw
from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_fits_the_source_and_names_tests_that_exist(fault: Fault) -> None:
    source = (Path(megatron_lw.__file__).parent / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    for test in fault.tests:
        assert (ROOT / test).is_file(), test
