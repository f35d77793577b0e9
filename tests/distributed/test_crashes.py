"""A save that is cut off anywhere leaves the checkpoint before it, or itself, to be loaded."""

from __future__ import annotations

import pytest

from tests.distributed.crash_cases import crash_everywhere
from tests.harness import run_ranks


@pytest.mark.parametrize(("step", "keep_last"), [(1, None), (2, 1)])
def test_what_a_crash_leaves_loads(step: int, keep_last: int | None) -> None:
    """Over the same step, and beside it with the older one deleted afterwards."""
    [(wrong, found)] = run_ranks(crash_everywhere, 1, step, keep_last)
    assert wrong == []
    assert found.keys() == {1.0, 2.0} and min(found.values()) > 10
