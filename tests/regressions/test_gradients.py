"""Reports of section B: buckets, and gradients that were reduced wrongly, not at all, or twice.

Class *exact sums*: gradients are small integers or powers of two; *bitwise* where copies are
compared. B2 is in `test_plan_bucket_alignment_b2`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from tests.harness import run_ranks
from tests.regressions.given import CONFIG, MUON, Tensors, backward, build, reduced, weights

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def tied_embedding() -> tuple[list[float], Tensors]:
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    other, shape = (("a_weight", (3, 3)), ("a2_weight", (5, 5)))[groups.pp.rank]
    built = build(
        {other: torch.ones(shape), "emb_weight": torch.ones(6, 2)},
        tags={"emb_weight": {"tied": "embedding", "embedding": True}},
        pipeline=2,
    )
    value = 1.0 + groups.world.rank
    backward(built, {other: torch.ones(shape), "emb_weight": torch.full((6, 2), value)})
    found = reduced(built).get("emb_weight", [])
    built[1].step()
    return found, weights(built)


def test_b1_a_tied_embedding_behind_parameters_of_different_sizes() -> None:
    """NVIDIA/Megatron-LM#844: slices at different offsets were summed: (1+2)/2 + (3+4)/2 = 5."""
    results = run_ranks(tied_embedding, 4)
    assert sorted({value for found, _ in results for value in found}) == [5.0]
    assert sum(len(found) for found, _ in results) == 2 * 12, "both stages have all of it"
    for _, weight in results:
        assert torch.equal(weight["emb_weight"], results[0][1]["emb_weight"])
        assert not torch.equal(weight["emb_weight"], torch.ones(6, 2))


def unused(steps: int) -> tuple[Tensors, int]:
    values = {"a_weight": torch.ones(16, 16), "z_weight": torch.full((16, 16), 2.0)}
    config = {**CONFIG, "weight_decay": 0.5}
    built = build(values, config=config, ddp_config={**OVERLAP, "bucket_size": 200})
    for _ in range(steps):
        backward(built, {"a_weight": torch.ones(16, 16)})
        built[1].step()
    return weights(built), len(built[0].buckets)


def test_b4_a_trainable_parameter_that_forward_does_not_use() -> None:
    """NVIDIA/Megatron-LM#1150: its reduce was never issued. Its gradient is zero: it decays."""
    for weight, buckets in run_ranks(unused, 2, 3):
        assert buckets == 2
        torch.testing.assert_close(weight["z_weight"], torch.full((16, 16), 2 * 0.95**3))
        assert float(weight["a_weight"].max()) < 0.95**3


def where_gradients_are() -> tuple[list[bool], list[float], str]:
    built = build({"a_weight": torch.ones(4, 4)}, ddp_config=OVERLAP)
    ddp, optimizer = built
    param = ddp.module.a_weight
    backward(built, {"a_weight": torch.full((4, 4), 3.0)})
    none = [param.grad is None]
    local = param.main_grad.flatten().tolist()
    optimizer.step()
    none.append(param.grad is None)
    optimizer.zero_grad()
    param.grad = torch.ones(4, 4)
    try:
        optimizer.step()
    except megatron_lw.StateError as error:
        return none, local, str(error)
    return none, local, ""


def test_b7_gradients_live_in_one_place_and_anywhere_else_is_an_error() -> None:
    """NVIDIA/Megatron-LM#1129, #879: `.grad` was None with overlap, and callers read it."""
    for none, local, message in run_ranks(where_gradients_are, 2):
        assert none == [True, True]
        assert local == [3.0] * 16, "the first backward of a run is not overlapped"
        assert "'a_weight'" in message and ".main_grad" in message


def second_step(ddp_config: dict[str, Any]) -> list[dict[str, list[float]]]:
    values = {"a_weight": torch.full((16, 16), 7.0), "b_bias": torch.full((130,), 7.0)}
    built = build(values, config=MUON, ddp_config=ddp_config)
    found = []
    for _ in range(3):
        backward(built, {name: torch.ones(value.shape) for name, value in values.items()})
        found.append(reduced(built))
        built[1].step()
    return found


@pytest.mark.parametrize("ddp_config", [{}, OVERLAP], ids=["plain", "overlap"])
def test_b9_gradients_are_never_added_onto_weights(ddp_config: dict[str, Any]) -> None:
    """NVIDIA/Megatron-LM#4609: storage that both used was not cleared: step 2 had 1 + weight."""
    for steps in run_ranks(second_step, 2, ddp_config):
        assert any(steps), "this rank's rows hold something"
        assert all(set(values) == {1.0} for step in steps for values in step.values())


def sequence_parallel(tagged: bool) -> tuple[dict[str, list[float]], Tensors]:
    built = build(
        {"norm_weight": torch.ones(24)},
        tags={"norm_weight": {"sequence_parallel": tagged}},
        tensor=2,
    )
    rank = built[0].groups.tp.rank
    backward(built, {"norm_weight": torch.full((24,), (1.0, 3.0)[rank])})
    found = reduced(built)
    built[1].step()
    return found, weights(built)


def test_b11_norm_gradients_of_sequence_parallel_ranks_are_summed() -> None:
    """NVIDIA/Megatron-LM#1446: replicas of the final layer norm drifted apart."""
    results = run_ranks(sequence_parallel, 2, True)
    assert [set(found["norm_weight"]) for found, _ in results] == [{4.0}, {4.0}]
    assert torch.equal(results[0][1]["norm_weight"], results[1][1]["norm_weight"])
    untagged = run_ranks(sequence_parallel, 2, False)
    assert [set(found["norm_weight"]) for found, _ in untagged] == [{1.0}, {3.0}]


def mixed_dtypes() -> dict[str, list[float]]:
    values = {"a_weight": torch.ones(4, 4).bfloat16(), "emb_weight": torch.ones(4, 4)}
    built = build(values, config={**CONFIG, "bf16": True})
    value = (1.0, 3.0)[built[0].groups.dp.rank]
    backward(built, {name: torch.full((4, 4), value) for name in values})
    return reduced(built)


def test_b13_gradients_of_every_dtype_are_reduced() -> None:
    """NVIDIA-NeMo/Speech#6340: a loop over dtypes left the fp32 embedding out."""
    results = run_ranks(mixed_dtypes, 2)
    for name in ("a_weight", "emb_weight"):
        values = [value for found in results for value in found.get(name, [])]
        assert values == [2.0] * 16


def reduce_dtype(in_fp32: bool) -> tuple[set[float], str, bool]:
    built = build(
        {"a_weight": torch.ones(8, 16).bfloat16()},
        config={**CONFIG, "bf16": True},
        ddp_config={} if in_fp32 else {"grad_reduce_in_fp32": False},
    )
    value = (1.0, 2.0**-10)[built[0].groups.dp.rank]
    backward(built, {"a_weight": torch.full((8, 16), value)})
    values = set(reduced(built)["a_weight"])
    (bucket,) = built[0].buckets
    return values, str(bucket.grads.dtype), built[0].ddp_config.grad_reduce_in_fp32


def test_b14_gradients_are_reduced_in_fp32_unless_the_setting_says_otherwise() -> None:
    """volcengine/verl#7485: bf16 sums where fp32 was wanted: 1 + 2**-10 needs 11 bits."""
    for values, dtype, setting in run_ranks(reduce_dtype, 2, True):
        assert values == {(1 + 2.0**-10) / 2}
        assert dtype == "torch.float32" and setting
    for values, dtype, setting in run_ranks(reduce_dtype, 2, False):
        assert values == {0.5}
        assert dtype == "torch.bfloat16" and not setting
