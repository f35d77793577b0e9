"""What a layout of ranks leaves as it is. Class of equality: numerical, FP32 within 1e-5."""

from __future__ import annotations

import pytest
import torch

from tests.megatron import launch, needs
from tests.megatron.runs import MOE, Part, Run, assembled

needs.megatron()

FP32 = "--muon-fp32-matmul-prec high --train-iters 4 --hidden-dropout 0 --attention-dropout 0"
TP2 = "--tensor-model-parallel-size 2"
GATED = "--swiglu --group-query-attention --num-query-groups 2 --softmax-type learnable"

ONE_GROUP = "--group-query-attention --num-query-groups 1"
EXPERTS = f"{MOE} --expert-model-parallel-size 2"
WHOLE_EXPERTS = f"{TP2} --sequence-parallel --expert-tensor-parallel-size 1"

Found = list[list[tuple[Run, list[Part]]]]


def in_layouts(*flags: str, ranks: int = 2) -> Found:
    return launch.on_ranks(
        ranks, "layout_cases", "parts_in", [[*FP32.split(), *each.split()] for each in flags]
    )


def test_gated_and_fused_weights_are_the_same_whole_weights_under_tensor_parallelism() -> None:
    found = in_layouts(GATED, f"{GATED} {TP2}")
    for one, two in found:
        assert two[0].losses == pytest.approx(one[0].losses, abs=1e-5, rel=0)
        assert two[0].norms == pytest.approx(one[0].norms, rel=1e-4)
    plain = assembled(part for one, _ in found for part in one[1])
    divided = assembled(part for _, two in found for part in two[1])
    assert plain.keys() == divided.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(divided[name], weight, atol=1e-5, rtol=0, msg=name)
    offsets = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    assert plain[offsets].shape == (4,)  # of every head, where Megatron tags none as divided
    assert plain[offsets].abs().min() > 0
    # As the shards lie, one after the other, a gated weight is another matrix.
    gated = "decoder.layers.0.mlp.linear_fc1.weight"
    shards = [[p.values for p in two[1] if p.name == gated] for _, two in found]
    assert len(shards[0]) == 2
    as_they_lie = torch.cat([torch.cat(parts) for parts in shards])
    assert (as_they_lie - plain[gated]).abs().max() > 1e-2


def test_query_groups_that_are_cut_are_split_all_the_same() -> None:
    """One group on two tensor-parallel ranks, where Megatron's own Muon would not split it."""
    found = in_layouts(ONE_GROUP, f"{ONE_GROUP} {TP2}", f"{ONE_GROUP} {TP2} --muon-no-split-qkv")
    plain, cut, whole = (assembled(part for r in found for part in r[i][1]) for i in range(3))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert plain[name].shape == (64 + 2 * 16, 64)
    torch.testing.assert_close(cut[name], plain[name], atol=1e-5, rtol=0)
    assert (whole[name] - plain[name]).abs().max() > 1e-4


def test_a_divided_sequence_changes_nothing() -> None:
    """Sequence parallelism and context parallelism, beside data parallelism."""
    found = in_layouts("", f"{TP2} --sequence-parallel", "--context-parallel-size 2")
    plain, *divided = (assembled(part for r in found for part in r[i][1]) for i in range(3))
    for number, weights in enumerate(divided, start=1):
        whole, run = found[0][0][0], found[0][number][0]
        assert run.losses == pytest.approx(whole.losses, abs=1e-5, rel=0)
        assert run.norms == pytest.approx(whole.norms, rel=1e-5)
        for name, weight in plain.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)


def test_experts_with_biases_are_the_same_under_tensor_parallelism() -> None:
    """Each on one rank of a data-parallel pair, or of a tensor-parallel one.

    In the second, Megatron itself would sum the gradients of the second biases over that pair: of
    experts 0 and 2, say.
    """
    found = in_layouts(EXPERTS, f"{EXPERTS} {WHOLE_EXPERTS}")
    for one, two in found:
        assert two[0].losses == pytest.approx(one[0].losses, abs=1e-5, rel=0)
        assert two[0].norms == pytest.approx(one[0].norms, rel=1e-4)
    plain, divided = (assembled(part for r in found for part in r[i][1]) for i in range(2))
    biases = [name for name in plain if "experts" in name and name.endswith("fc2.bias")]
    assert len(biases) == 8
    for name in plain:
        torch.testing.assert_close(divided[name], plain[name], atol=1e-5, rtol=0, msg=name)


def test_a_split_of_fused_attention_is_another_update() -> None:
    [[(split, _), (whole, _)]] = in_layouts("", "--muon-no-split-qkv", ranks=1)
    assert split.losses[0] == whole.losses[0]
    assert abs(split.losses[-1] - whole.losses[-1]) > 1e-4
