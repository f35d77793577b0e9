"""The optimizer in Megatron's checkpoints. Each test names its class of equality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import launch, needs
from tests.megatron.runs import MOE

needs.megatron()

SHORT = ["--train-iters", "6", "--hidden-dropout", "0", "--attention-dropout", "0"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]
BESIDE = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
FP32 = ["--muon-fp32-matmul-prec", "high"]
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
DP2 = ["--bf16", *SHORT, *OVERLAP]


def run(case: str, ranks: int, *args: object) -> list[Any]:
    return launch.on_ranks(ranks, "checkpoint_cases", case, *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """What two data-parallel ranks saved, and what they found."""
    directory = str(tmp_path_factory.mktemp("checkpoints") / "dp2")
    return directory, run("resume", 2, directory, DP2, BESIDE)


def test_resume_in_the_same_layout(saved: tuple[str, list[Any]]) -> None:
    """Bitwise, weights full of garbage before; saving, also beside training, changes nothing."""
    for found in saved[1]:
        plain, whole, rest = found["plain"], found["whole"], found["rest"]
        assert whole.losses == plain.losses
        assert len(rest.losses) == 3
        assert rest.losses == whole.losses[3:]
        assert rest.norms == whole.norms[3:]
        assert all(torch.equal(whole.weights[k], w) for k, w in rest.weights.items())
        assert found["saved"] > 30
        assert found["differ"] == []


def test_two_data_parallel_ranks_save_and_four_go_on(saved: tuple[str, list[Any]]) -> None:
    """States bitwise; losses numerical, bf16: within 5e-3."""
    directory, found = saved
    for rest, differ in run("go_on", 4, directory, DP2):
        assert differ == []
        assert rest.losses == pytest.approx(found[0]["whole"].losses[3:], abs=5e-3, rel=0)


@pytest.mark.parametrize("how", ["--no-load-optim", "--finetune"])
def test_weights_alone(saved: tuple[str, list[Any]], how: str) -> None:
    """Bitwise: masters are the loaded weights, states are zero."""
    directory, found = saved
    for rest, (rows, sums, *masters) in run("weights_alone", 2, directory, DP2, how):
        assert len(rest.losses) == (3 if how == "--no-load-optim" else 6)
        assert sum(rows) > 50_000
        assert set(sums) == {0.0}
        assert all(masters)
        assert rest.losses[0] < found[0]["whole"].losses[0] - 0.2


def test_the_present_schedule_where_it_is_asked_for(saved: tuple[str, list[Any]]) -> None:
    """Bitwise for the first loss, which the loaded weights give."""
    directory, found = saved
    for rest, rates in run("other_schedule", 2, directory, DP2):
        assert rates == {(2e-3, 2e-3)}
        assert rest.losses[0] == found[0]["whole"].losses[3]
        assert rest.losses[2] != found[0]["whole"].losses[5]


# name -> (flags of both, flags that saved, flags that go on, whether with our DDP)
CHANGES: dict[str, tuple[str, str, str, bool]] = {
    "tp2_to_tp1": (
        "--swiglu --group-query-attention --num-query-groups 2",
        "--tensor-model-parallel-size 2",
        "",
        True,
    ),
    "pp2_to_pp1_adaptive": (
        "--optimizer adaptive_muon",
        "--pipeline-model-parallel-size 2",
        "",
        True,
    ),
    "tp2_ep2_etp1_to_one": (
        f"{MOE} --disable-bias-linear",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
        "",
        True,
    ),
    "to_megatrons_ddp": (
        "",
        "--ckpt-assume-constant-structure",
        "--ckpt-fully-parallel-load --dist-ckpt-strictness raise_unexpected",
        False,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_layout_goes_on(name: str, tmp_path: Path) -> None:
    """States bitwise by name; losses numerical, FP32: within 1e-5."""
    *texts, ddp = CHANGES[name]
    flags, before, after = (text.split() for text in texts)
    both = [*SHORT, *FP32, *flags]
    found = run("other_layouts", 2, str(tmp_path / "run"), both, before, after, ddp)
    for _, _, differ, count in found:
        assert differ == []
        assert count > 30
    whole = next(whole for whole, *_ in reversed(found) if whole.losses)
    assert len(whole.losses) == 6
    for _, rest, *_ in found:
        assert rest.losses == pytest.approx(whole.losses[3:], abs=1e-5, rel=0)
        assert rest.norms == pytest.approx(whole.norms[3:], rel=1e-4)


MUON = ["--bf16", *SHORT]
ADAM = ["--fp16", *SHORT, "--optimizer", "adam", "--accumulate-allreduce-grads-in-fp32"]
ADAM += ["--initial-loss-scale", "65536", "--loss-scale-window", "2"]
SPREAD = "--use-distributed-optimizer"
DECOUPLED = [RESHARDABLE, "--decoupled-lr", "5e-4", "--untie-embeddings-and-output-weights"]
# name -> (flags, flags left out, whether in Megatron's layout, whether losses are FP32's)
OPTIMIZERS: dict[str, tuple[list[str], list[str], bool, bool]] = {
    "layer-wise Muon, one buffer": ([*MUON, *DECOUPLED], [], False, False),
    "layer-wise Muon, laid out": ([*MUON, RESHARDABLE], [], True, False),
    "Muon alone": ([*SHORT, *FP32], [SPREAD], False, True),
    "DistributedOptimizer": ([*ADAM, *DECOUPLED], [], False, False),
}


@pytest.mark.parametrize("ours_first", [False, True], ids=["import", "export"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_megatrons_optimizers_and_ours_go_on_from_each_other(
    name: str, ours_first: bool, tmp_path: Path
) -> None:
    """States bitwise, momentum as it is; losses numerical: FP32 1e-5, BF16 and FP16 5e-3.

    And every parameter group is found again, those of a decoupled learning rate included.
    """
    flags, without, laid_out, is_fp32 = OPTIMIZERS[name]
    found = run("exchange", 2, str(tmp_path / "run"), flags, without, ours_first, laid_out)
    for whole, rest, differ, count in found:
        assert differ == []
        assert count > 30
        close = {"abs": 1e-5 if is_fp32 else 5e-3, "rel": 0}
        assert rest.losses == pytest.approx(whole.losses[3:], **close)
        assert rest.norms == pytest.approx(whole.norms[3:], rel=1e-4 if is_fp32 else 2e-2)
        assert rest.extra == [whole.extra[2]]
        assert ("--fp16" in flags) == (whole.extra[2] != whole.extra[0])


def test_another_child_starts_anew_and_says_so(tmp_path: Path) -> None:
    """Losses go on from the masters."""
    found = run("other_child", 2, str(tmp_path / "run"), MUON)
    text, kept = found[0][1]
    assert "start anew" in text
    assert "keep their settings: muon" in kept
    assert "linear_fc1.weight" in text
    assert "linear_fc1.bias" not in text
    assert not found[1][1]
    for rest, _ in found:
        assert rest.losses[-1] < rest.losses[0] < 4.7


def test_state_by_buckets_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for text in run("in_buckets", 2, str(tmp_path / "run"), MUON):
        assert text.startswith("CheckpointError")
        assert RESHARDABLE in text


@pytest.mark.parametrize(
    "before",
    ["--tensor-model-parallel-size 2 --swiglu", "--pipeline-model-parallel-size 2"],
    ids=["tp2_to_tp1", "pp2_to_pp1"],
)
def test_our_own_checkpoints_of_megatrons_models(before: str, tmp_path: Path) -> None:
    """States bitwise by name; losses numerical, FP32: within 1e-5."""
    size, number, *rest = before.split()
    both = [*SHORT, *FP32, *rest]
    found = launch.on_ranks(
        2,
        "native_checkpoint_cases",
        "other_layouts",
        str(tmp_path / "run"),
        both,
        [size, number],
        [],
    )
    whole = next(whole for whole, *_ in reversed(found) if whole.losses)
    for _, other, differ, count in found:
        assert differ == []
        assert count > 50
        assert other.losses[0] != whole.losses[0]
        assert other.losses[3:] == pytest.approx(whole.losses[3:], abs=1e-5, rel=0)
        assert other.norms[3:] == pytest.approx(whole.norms[3:], rel=1e-4)
