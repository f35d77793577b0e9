"""Megatron's pretraining loop, its own Muon and ours in one run: same seed, data and flags.

Class of equality: numerical. FP32: losses within 1e-5 and norms within 1e-4 over 20 steps. BF16:
losses within 5e-3, with Megatron's own spread under another micro-batching, over ten steps, printed
beside it.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.megatron import launch, needs
from tests.megatron.runs import MOE, Run, last_stage

needs.megatron()

BATCH = ["--global-batch-size", "4"]
FP32 = ("--muon-fp32-matmul-prec", "high")
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
EXPERTS = f"{MOE} --expert-model-parallel-size 2 --disable-bias-linear"
# name -> (ranks, flags)
LAYOUTS: dict[str, tuple[int, str]] = {
    "dp2": (2, ""),
    "tp2": (2, TP2),
    "pp2_tied": (2, PP2),
    "pp2_untied": (2, f"{PP2} {UNTIED}"),
    "dp2_ep2": (2, EXPERTS),
    "dp2_tp2_overlapped": (4, f"{TP2} {OVERLAP}"),
}
# Ten steps in FP32.
OPTIONS: dict[str, tuple[int, str]] = {
    "vpp2_overlapped": (
        2,
        f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 {OVERLAP}",
    ),
    "tp2_swiglu_gqa": (2, f"{TP2} --swiglu --group-query-attention --num-query-groups 2"),
    "tp2_qk_layernorm": (2, f"{TP2} --qk-layernorm --muon-no-split-qkv"),
    "dp2_per_token": (2, "--calculate-per-token-loss --muon-no-split-qkv"),
    "cp2": (2, "--context-parallel-size 2"),
    # One rank a whole expert, two a dense weight.
    "tp2_whole_experts": (
        2,
        f"{TP2} {EXPERTS} --sequence-parallel --expert-tensor-parallel-size 1",
    ),
}


@cache
def layout(name: str) -> list[tuple[Run, ...]]:
    """All runs of a layout, on each rank; see `training_cases.layout`."""
    ranks, flags = LAYOUTS[name]
    # Most tokens occur in no batch: the gradients of their embeddings are zero. Tied to the output
    # layer they are not.
    unseen = [] if name == "pp2_tied" else f"--vocab-size 500 {UNTIED}".split()
    # In bf16 a last bit moves a token to another expert, unless it goes to all.
    bf16 = ["--moe-router-topk", "4"] if name == "dp2_ep2" else []
    case = (flags.split() + BATCH, list(FP32), bf16, unseen)
    return launch.on_ranks(ranks, "training_cases", "layout", *case)


def check_fp32(found: list[tuple[Run, ...]], steps: int) -> None:
    theirs, ours = last_stage(found)
    assert len(ours.losses) == len(theirs.losses) == steps
    assert theirs.losses[-1] < theirs.losses[0] - 0.2  # it trains
    assert max(n for n in theirs.norms if n is not None) > 1.0  # and clips
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5, rel=0)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
    # Later counts are sums that happen to cancel, which a last bit of a weight moves: see below.
    assert ours.zeros[0] == theirs.zeros[0]
    for other, mine in found:
        for key, weight in other.weights.items():
            assert (mine.weights[key] - weight).abs().max() < 1e-4, key


@pytest.mark.parametrize("name", OPTIONS)
def test_fp32_losses_and_norms_are_megatrons_with(name: str) -> None:
    ranks, flags = OPTIONS[name]
    shorter = [*flags.split(), *BATCH, *FP32, "--train-iters", "10"]
    check_fp32(launch.on_ranks(ranks, "training_cases", "side_by_side", shorter, True), 10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_losses_and_norms_are_megatrons(name: str) -> None:
    check_fp32([runs[:2] for runs in layout(name)], 20)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_losses_are_megatrons(name: str) -> None:
    theirs, other, ours = last_stage([runs[2:5] for runs in layout(name)])
    spread = _largest(theirs, other)
    difference = _largest(theirs, ours)
    print(f"{name}: ours {difference:.1e}, Megatron under another micro-batching {spread:.1e}")
    assert len(ours.losses) == 20
    assert difference < 5e-3


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_counts_are_megatrons(name: str) -> None:
    """Exact: the weights stay equal, as nothing learns, and each batch leaves out other tokens."""
    theirs, ours = last_stage([runs[5:] for runs in layout(name)])
    assert ours.losses == theirs.losses
    assert ours.zeros == theirs.zeros
    assert len(set(ours.zeros)) == 3
    assert min(zeros or 0 for zeros in ours.zeros) > (10 if name == "pp2_tied" else 1000)


def _largest(one: Run, two: Run) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=False))
