"""Checkpoints over ranks: any layout to any other by value, and what is refused."""

from __future__ import annotations

import pytest

from tests.distributed import checkpoint_cases as cases
from tests.harness import run_ranks

LAYOUTS = {
    1: [{}],
    2: [{}, {"tensor": 2}, {"pipeline": 2}, {"expert": 2}],
    3: [{}],
    4: [
        {},
        {"tensor": 2},
        {"tensor": 4},
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
        {"tensor": 2, "expert": 2},
        {"pipeline": 2},
        {"pipeline": 2, "tensor": 2},
        {"expert": 2, "expert_tensor": 2},
    ],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint a layout; value = global element index."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = []
    for ranks, layouts in LAYOUTS.items():
        found += run_ranks(cases.save_all, ranks, root, layouts)[0]
    assert len(found) == 14
    return found


@pytest.mark.parametrize(
    "ranks, sizes", [(ranks, sizes) for ranks, layouts in LAYOUTS.items() for sizes in layouts]
)
def test_any_layout_loads_what_any_other_saved(saved, ranks, sizes):
    """Bitwise, over masters, states, weights, buffers, step counts and settings."""
    for found in run_ranks(cases.load_all, ranks, sizes, saved):
        assert found == {path: [] for path in saved}


@pytest.mark.parametrize(
    "ranks, changes",
    [
        (2, {"bucket_size": 64}),
        (3, {"bucket_size": 100_000}),
        (2, {"reverse": True}),
        (2, {"sizes": {"tensor": 2}, "bucket_size": 1, "reverse": True}),
    ],
)
def test_other_buckets_and_another_order_of_registration_load_the_same(saved, ranks, changes):
    """Bitwise."""
    changes = {"sizes": {}} | changes
    for found in run_ranks(cases.load_changed, ranks, saved[:6], changes):
        assert found == {path: [] for path in saved[:6]}


@pytest.mark.parametrize("ranks, sizes", [(1, {}), (2, {}), (4, {"tensor": 2}), (4, {"expert": 2})])
def test_save_load_save_gives_identical_files(tmp_path, ranks, sizes):
    """Bitwise: names and bytes of all files."""
    for (first, second), equal in run_ranks(cases.save_load_save, ranks, tmp_path, sizes):
        assert first == second
        assert len(first) == ranks + 1
        assert all(equal.values())
