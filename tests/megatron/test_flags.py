"""Flags that change what Megatron builds. Each test names its class of equality."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron import launch, needs
from tests.megatron.runs import last_stage

needs.megatron()

SHORT = "--train-iters 4 --global-batch-size 4 --hidden-dropout 0 --attention-dropout 0".split()
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --position-embedding-type rope --tensor-model-parallel-size 2"
)
GROUPED = "--group-query-attention --num-query-groups 2"


def run(case: str, flags: str, *args: object, ranks: int = 2) -> list[Any]:
    return launch.on_ranks(ranks, "flag_cases", case, [*SHORT, *flags.split()], *args)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--optimizer lion", id="lion"),
        pytest.param(
            "--optimizer adam --use-mup --mup-base-hidden-size 32 --adam-eps 1e-3", id="mup_adam"
        ),
    ],
)
def test_fp32_losses_and_norms_are_megatrons(flags: str) -> None:
    """Numerical: losses within 1e-5, norms within 1e-4.

    Megatron's Lion has matrices only and the decay rates of Adam, which steps the rest; muP gives
    hidden weights an epsilon of their own.
    """
    theirs, ours = last_stage(run("side_by_side", flags))
    assert len(ours.losses) == 4
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5, rel=0)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
    for key, weight in theirs.weights.items():
        assert (ours.weights[key] - weight).abs().max() < 1e-4, key


@pytest.mark.parametrize(
    ("flags", "scaled"),
    [
        pytest.param(GROUPED, {"linear_qkv": [*[True] * 3, False] * 2}, id="grouped"),
        pytest.param(
            LATENT,
            {"linear_q_proj": [True] * 6, "linear_kv_up_proj": [True, False] * 2},
            id="latent_tp2",
        ),
    ],
)
def test_qk_clip_scales_what_megatrons_does(flags: str, scaled: dict[str, list[bool]]) -> None:
    """Numerical, bf16: each scaled weight within two roundings, the rest of the rows bitwise."""
    found = run("clipped", f"--bf16 --lr 0 --train-iters 2 {flags}", 1e-3)
    for theirs, ours, before in found:
        assert ours.losses == pytest.approx(theirs.losses, abs=5e-3, rel=0)
        for name, expected in scaled.items():
            key = f"decoder.layers.1.self_attention.{name}.weight"
            start = before[key].bfloat16().float()
            mine, other = (each.weights[f"0.module.module.{key}"] for each in (ours, theirs))
            torch.testing.assert_close(mine, other, rtol=2**-7, atol=1e-12)
            height = len(start) // len(expected)
            pairs = zip(mine.split(height), start.split(height), strict=True)
            assert [bool((m.abs() < 0.9 * s.abs()).any()) for m, s in pairs] == expected
            kept = torch.cat([torch.full((height,), not e) for e in expected])
            assert torch.equal(mine[kept], start[kept])


def test_qk_clip_needs_attention_that_measures() -> None:
    for message in run("unmeasured", "--bf16"):
        assert "linear_qkv.weight" in message
        assert "drop --qk-clip" in message


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param("--ckpt-format torch", "--ckpt-format torch cannot hold", id="torch"),
        pytest.param(
            "--ckpt-format torch --no-save-optim --optimizer muon", "or drop --save", id="per_rank"
        ),
        pytest.param(
            "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 2",
            "pass --untie-embeddings-and-output-weights",
            id="multi_token_prediction",
        ),
    ],
)
def test_what_would_fail_later_is_refused_on_every_rank(flags: str, said: str) -> None:
    """The second stage alone finds that Megatron cannot name the weights of the third case."""
    for message in run("refused", f"--save nowhere --save-interval 9 {flags}"):
        assert said in message
