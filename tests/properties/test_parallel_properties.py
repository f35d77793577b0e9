"""Random models, topologies and interleavings against one whole process, on 1 to 4 ranks.

Class *exact sums* where gradients are integers and the clip is off: element-wise children bitwise,
fp32 Newton-Schulz within 1e-5 of the reference's fp64 one; else class *numerical*, within 1e-5.
Class *bitwise*: all copies of a parameter, what forward reads against the masters, quantised
weights with both planes, and masters over a step that is skipped, fails, or is taken back by a
load, and over a move to another topology by way of a checkpoint. Norm and zero count are the
reference's; all ranks of a group make the same calls on it.

100 examples, four for each topology, with fixed seeds where `CI` is set; 2,000 in `make fuzz`. The
topologies are parameters of the test, so that each of them occurs.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import event, given, seed, settings

from tests.harness import run_ranks
from tests.properties.parallel_checks import check, features
from tests.properties.parallel_models import KINDS, OPERATIONS, TOPOLOGIES, Case
from tests.properties.parallel_ranks import run_case
from tests.properties.parallel_strategies import cases

REQUIRED = {
    *KINDS,
    *OPERATIONS,
    *(f"use {use}" for use in ("own", "loose", "borrowed", "twice")),
    *(f"step {kind}" for kind in ("plain", "nonfinite", "huge", "empty", "fail", "break")),
    *("fp8_param_gather True", "moved", "other ranks", "background"),
    *(f"finalize {how}" for how in ("step", "hook", "tokens")),
    *("dtype float32", "dtype bfloat16", "optimizer muon", "optimizer adam"),
    *("exact True", "exact False", "divided", "accumulate", "absent", "clip", "garbage", "late"),
    *("overlap_grad_reduce True", "overlap_param_gather True", "grad_reduce_in_fp32 False"),
    *("average_in_collective True", "reduce_scatter_with_fp32_accumulation True", "skipped"),
    *("reducing", "gathering", "several buckets", "mixed"),
    *("empty_row", "cut", "nothing held"),
}


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    """What the examples contained; complete runs must have contained everything."""
    found: Counter[str] = Counter()
    yield found
    if all(found[topology] for topology in TOPOLOGIES):
        assert not [name for name in REQUIRED if not found[name]], found


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_any_run_equals_one_process(
    topology: str, seen: Counter[str], request: pytest.FixtureRequest
) -> None:
    examples = settings.default.max_examples // len(TOPOLOGIES)

    @settings(max_examples=examples)
    @given(cases(topology))
    def example(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            reports = [
                run_ranks(run_case, part.ranks, case, Path(folder), phase)
                for phase, (part, _) in enumerate(case.phases)
            ]
        check(case, reports)
        found = features(case, reports)
        seen.update({topology, *found})
        for name in found:
            event(name)

    # Otherwise every topology would get the same models.
    base = request.config.getoption("--hypothesis-seed", default=None)
    if base is None and settings.default.derandomize:
        base = "fixed"
    (example if base is None else seed(f"{base}/{topology}")(example))()
