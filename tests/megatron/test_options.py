"""Options of Megatron's loop with our optimizer. Each test names its class of equality."""

from __future__ import annotations

import pytest
import torch

from tests.megatron import launch, needs
from tests.megatron.runs import MOE, last_stage

needs.megatron()

SHORT = ["--train-iters", "6"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]


def run(case: str, ranks: int, *args: object) -> list:  # type: ignore[type-arg]
    return launch.on_ranks(ranks, "option_cases", case, *args)


def test_evaluation_between_steps_changes_nothing() -> None:
    """Bitwise."""
    flags = ["--bf16", *SHORT, *OVERLAP]
    evaluation = ["--eval-interval", "2", "--eval-iters", "2"]
    for plain, evaluated in run("with_and_without", 2, flags, evaluation):
        assert evaluated.losses == plain.losses
        assert evaluated.norms == plain.norms
        assert all(torch.equal(plain.weights[k], w) for k, w in evaluated.weights.items())


def test_overlap_changes_nothing() -> None:
    """Bitwise, from the second step on with reduces and gathers under way."""
    flags = ["--bf16", *SHORT, "--ddp-bucket-size", "20000"]
    for plain, overlapped in run("with_and_without", 2, flags, OVERLAP):
        assert overlapped.losses == plain.losses
        assert overlapped.norms == plain.norms
        assert all(torch.equal(plain.weights[k], w) for k, w in overlapped.weights.items())


def test_one_reduce_scatter_a_bucket_a_step() -> None:
    """The loop accumulates two micro-batches: it finds `no_sync` and our hooks."""
    for buckets, calls in run("reduces", 2, ["--bf16", *SHORT, *OVERLAP]):
        assert buckets > 2
        assert calls == [buckets * (step + 1) for step in range(6)]


def test_frozen_parameters_stay_and_the_rest_trains() -> None:
    """Bitwise for what is frozen."""
    for before, after in run("frozen", 2, ["--bf16", *SHORT, *OVERLAP], "layers.0."):
        assert after.losses[-1] < after.losses[0]
        for name, weight in before.weights.items():
            trained = after.weights[f"0.module.module.{name}"]
            assert torch.equal(weight, trained) == ("layers.0." in name), name


def test_a_stage_with_nothing_trainable_takes_part() -> None:
    flags = [*SHORT, "--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"]
    (first, trainable), (last, nothing) = run("frozen_stage", 2, flags)
    assert set(trainable) != {0}
    assert set(nothing) == {0}
    assert last.losses[-1] < last.losses[0]
    assert first.norms == last.norms


def test_layers_that_accumulate_their_own_weight_gradients() -> None:
    """Numerical: losses within 1e-5 in FP32 (micro-batches are summed in another order)."""
    for plain, fused, calls in run("fused", 2, [*SHORT, "--muon-fp32-matmul-prec", "high"]):
        assert calls > 40
        assert fused.losses == pytest.approx(plain.losses, abs=1e-5, rel=0)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            f"--bf16 --expert-model-parallel-size 2 {MOE} --disable-bias-linear", id="ep2"
        ),
        pytest.param("--pipeline-model-parallel-size 2 --calculate-per-token-loss", id="pp2"),
        pytest.param("--tensor-model-parallel-size 2 --swiglu --optimizer adam", id="tp2"),
    ],
)
def test_megatrons_own_ddp_can_stay(flags: str) -> None:
    """Bitwise: on two ranks a sum has one order, and halving is exact."""
    for ours, adopted in run("adopted", 2, [*SHORT, *flags.split()]):
        assert adopted.losses == ours.losses
        assert adopted.norms == ours.norms
        assert adopted.zeros == ours.zeros
        for name, weight in ours.weights.items():
            assert torch.equal(adopted.weights[name], weight), name


def test_megatrons_own_ddp_goes_with_nothing_else() -> None:
    flags = "--fp16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    [message] = run("adopting_refuses", 1, ["--optimizer", "adam", *flags.split()])
    assert "install(ddp=False)" in message
    for flag in flags.split():
        assert f"drop {flag}" in message


def test_fp16_skips_the_same_steps_as_megatron_and_trains_alike() -> None:
    """Numerical: losses within 5e-3."""
    flags = ["--fp16", "--optimizer", "adam", "--initial-loss-scale", "8388608", "--train-iters"]
    flags += ["10", "--loss-scale-window", "4", "--hysteresis", "1"]
    flags += ["--accumulate-allreduce-grads-in-fp32"]  # else our sum overflows before its division
    theirs, ours = last_stage(run("fp16", 2, flags))
    assert ours.skipped == theirs.skipped > 0
    assert [norm is None for norm in ours.norms] == [norm is None for norm in theirs.norms]
    assert ours.losses == pytest.approx(theirs.losses, abs=5e-3, rel=0)


def test_fp16_with_muon_trains_where_megatron_refuses() -> None:
    flags = ["--fp16", "--initial-loss-scale", "8388608", "--train-iters", "8", "--hysteresis", "1"]
    for plain, halved in run("with_and_without", 2, flags, ["--initial-loss-scale", "1024"]):
        assert plain.skipped > halved.skipped == 0
        assert halved.losses[-1] < halved.losses[0] - 0.2
        assert all(weight.isfinite().all() for weight in plain.weights.values())
