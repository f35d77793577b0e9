"""Megatron's pretraining loop, its own Muon and ours in one run: same seed, data and flags.

Class of equality: numerical. FP32: losses within 1e-5 and norms within 1e-4 over 20 steps. BF16:
losses within 5e-3, with Megatron's own spread under another micro-batching printed beside it.
"""

from __future__ import annotations

import pytest

from tests.megatron import launch, needs
from tests.megatron.runs import Run, last_stage

needs.megatron()

FP32 = ("--muon-fp32-matmul-prec", "high")
STILL = ("--bf16", "--lr", "0", "--train-iters", "3")
UNSEEN = ("--vocab-size", "500", "--untie-embeddings-and-output-weights")
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
MOE = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
# name -> (ranks, flags)
LAYOUTS: dict[str, tuple[int, str]] = {
    "dp2": (2, ""),
    "tp2_whole_qkv": (2, "--tensor-model-parallel-size 2 --muon-no-split-qkv"),
    "pp2_tied": (2, "--pipeline-model-parallel-size 2"),
    "pp2_untied": (2, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    "dp2_tp2_overlapped": (4, f"--tensor-model-parallel-size 2 {OVERLAP}"),
    "dp2_ep2": (2, f"{MOE} --expert-model-parallel-size 2 --disable-bias-linear"),
    "vpp2_overlapped": (
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 "
        f"--num-layers-per-virtual-pipeline-stage 1 {OVERLAP}",
    ),
    "tp2_swiglu_gqa": (
        2,
        "--tensor-model-parallel-size 2 --swiglu --group-query-attention --num-query-groups 2",
    ),
    "dp2_per_token": (2, "--calculate-per-token-loss --muon-no-split-qkv"),
    "tp2_qk_layernorm": (2, "--tensor-model-parallel-size 2 --qk-layernorm"),
    "cp2": (2, "--context-parallel-size 2"),
    # One rank a whole expert, two a dense weight.
    "tp2_sequence_parallel_experts": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {MOE} --disable-bias-linear --group-query-attention "
        "--num-query-groups 2",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_losses_norms_and_zeros_are_megatrons(name: str) -> None:
    ranks, flags = LAYOUTS[name]
    found = launch.on_ranks(ranks, "training_cases", "side_by_side", [*flags.split(), *FP32], True)
    theirs, ours = last_stage(found)
    assert len(ours.losses) == len(theirs.losses) == 20
    assert theirs.losses[-1] < theirs.losses[0] - 0.3  # it trains
    assert max(n for n in theirs.norms if n is not None) > 1.0  # and clips
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5, rel=0)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
    # Later counts are sums that happen to cancel, which a last bit of a weight moves: see below.
    assert ours.zeros[0] == theirs.zeros[0]
    for mine, other in found:
        for key, weight in other.weights.items():
            assert (mine.weights[key] - weight).abs().max() < 1e-4, key


@pytest.mark.parametrize("name", ["dp2", "tp2_swiglu_gqa", "pp2_tied", "dp2_ep2"])
def test_zero_counts_are_megatrons(name: str) -> None:
    """Exact: the weights stay equal, as nothing learns, and each batch leaves out other tokens."""
    ranks, flags = LAYOUTS[name]
    unseen = [] if name == "pp2_tied" else UNSEEN
    found = launch.on_ranks(
        ranks, "training_cases", "side_by_side", [*flags.split(), *unseen, *STILL]
    )
    theirs, ours = last_stage(found)
    assert ours.losses == theirs.losses
    assert ours.zeros == theirs.zeros
    assert len(set(ours.zeros)) == 3
    assert min(zeros or 0 for zeros in ours.zeros) > (1000 if unseen else 10)


@pytest.mark.parametrize("name", ["dp2", "tp2_qk_layernorm", "pp2_tied"])
def test_bf16_losses_are_megatrons(name: str) -> None:
    ranks, flags = LAYOUTS[name]
    found = launch.on_ranks(ranks, "training_cases", "with_spread", [*flags.split(), "--bf16"])
    theirs, other, ours = last_stage(found)
    spread = _largest(theirs, other)
    difference = _largest(theirs, ours)
    print(f"{name}: ours {difference:.1e}, Megatron under another micro-batching {spread:.1e}")
    assert difference < 5e-3
    assert ours.zeros[0] == theirs.zeros[0]


def _largest(one: Run, two: Run) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True))
