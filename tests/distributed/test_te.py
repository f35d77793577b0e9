"""Weights of Transformer Engine on the ranks, against ours. Class *bitwise*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import te_stub
from tests.distributed import te_cases
from tests.harness import run_ranks
from tests.te_weights import RECIPES

pytestmark = pytest.mark.skipif(not te_stub.present(), reason=te_stub.MISSING)


def equal(ranks: int, kind: str, steps: int, keep: bool = True, **options: Any) -> None:
    for found in run_ranks(te_cases.equal_to_ours, ranks, kind, steps, keep, options):
        assert found == {"theirs": 6, "changed": 12, "planes": 12, "bytes twice": 0, "moved": 0}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", RECIPES)
def test_their_weights_train_as_ours_do(kind: str, overlap: bool) -> None:
    """Losses, norms, masters, states, bytes, scales and values of both planes, held once."""
    equal(2, kind, 5, overlap=overlap)


@pytest.mark.parametrize("kind", ["mxfp8", "block", "delayed"])
def test_cut_in_three_beside_bf16_and_fp32_and_without_initial_values(kind: str) -> None:
    equal(3, kind, 3, keep=False, optimizer="adam", bucket_size=10**7)


def test_where_bf16_travels_and_experts_have_one_rank() -> None:
    equal(2, "block", 3, gather=False, ep=2)


@pytest.mark.parametrize(
    ("kind", "saved_by_us"), [("mxfp8", False), ("delayed", False), ("block", True)]
)
def test_a_checkpoint_gives_their_bytes_too(kind: str, saved_by_us: bool, tmp_path: Path) -> None:
    run_ranks(te_cases.resumed, 2, tmp_path, kind, saved_by_us)


@pytest.mark.parametrize("kind", ["tensor", "block", "mxfp8", "mxfp8-2d"])
def test_frozen_weights_of_theirs_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    for count in run_ranks(te_cases.frozen_resumed, 2, tmp_path, kind):
        assert count == 2 * (3 if kind == "tensor" else 4)


@pytest.mark.parametrize("kind", ["mxfp8-2d", "delayed"])
def test_check_reads_their_buffers_and_masters_follow_what_was_written(kind: str) -> None:
    for text, _ in run_ranks(te_cases.changed_by_hand, 2, kind, False):
        assert "row_data of parameter 'experts.1.weight'" in text, text
    for text, after in run_ranks(te_cases.changed_by_hand, 2, kind, True):
        assert "parameter 'experts.1.weight' has other bytes or scales" in text, text
        assert after == ""


def test_other_kinds_are_refused_on_every_rank() -> None:
    for found in run_ranks(te_cases.refused, 2):
        assert "'mid.weight', a NVFP4Tensor of Transformer Engine" in found["NVFP4"]
        assert "'mid.weight', a GroupedTensor of Transformer Engine" in found["grouped"]
        assert "'mid.weight', a Unknown of Transformer Engine" in found["unknown"]
        assert all(text.startswith("ConfigError") for text in found.values())
