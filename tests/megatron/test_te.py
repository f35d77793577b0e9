"""MXFP8 weights of Transformer Engine in Megatron's layers. Class *bitwise*.

Its matrix products need a GPU; its tensors do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import te_stub
from tests.megatron import launch, needs

needs.megatron()
pytestmark = pytest.mark.skipif(not te_stub.present(), reason=te_stub.MISSING)

FLAGS = "--bf16 --train-iters 6 --ddp-bucket-size 20000".split()
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


def test_mxfp8_weights_train_alike_in_either_wire_and_overlapped() -> None:
    plain = launch.on_ranks(2, "te_cases", "trained", FLAGS, False)
    other = launch.on_ranks(2, "te_cases", "trained", [*FLAGS, *OVERLAP], True)
    first = plain[0][0]
    assert first.losses[-1] < first.losses[0] - 0.05
    assert len(first.extra[0]) == 16  # two layers of four weights, two planes each
    assert all(not torch.equal(first.extra[0][key], first.extra[-1][key]) for key in first.extra[0])
    for run, wrong in (*plain, *other):
        assert wrong == []
        assert run.losses == first.losses
        assert run.norms == first.norms
        for mine, values in zip(run.extra, first.extra, strict=True):
            assert all(torch.equal(mine[key], values[key]) for key in values)


def test_a_checkpoint_brings_the_bytes_back(tmp_path: Path) -> None:
    flags = [*FLAGS, "--train-iters", "2"]
    for steps in launch.on_ranks(2, "te_cases", "saved_and_loaded", str(tmp_path / "ck"), flags):
        assert steps == [(16, 16), (16, 16)]
