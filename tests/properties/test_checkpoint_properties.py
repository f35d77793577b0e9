"""Random models: what one layout of ranks saves, another one holds after a load, by value.

Class *bitwise*. A dozen examples where nothing else is asked for, 200 in `make fuzz`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, event, given, settings

from tests.harness import run_ranks
from tests.properties.checkpoint_ranks import load_one, save_one
from tests.properties.checkpoint_strategies import Example, examples

EXAMPLES = max(12, settings.default.max_examples // 10) if settings.default else 12


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(examples())
def test_any_layout_loads_what_any_other_saved(example: Example) -> None:
    saved, loaded = example.saved, example.loaded
    event(f"{saved.ranks} ranks to {loaded.ranks}")
    event(example.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        assert sum(run_ranks(save_one, saved.ranks, Path(folder), example)) > 0
        reports = run_ranks(load_one, loaded.ranks, Path(folder), example)
    empty = ["nothing was compared"]
    assert [each for each in reports if each not in ([], empty)] == []
    assert [] in reports
