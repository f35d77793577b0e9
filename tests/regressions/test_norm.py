"""Reports of section C: norm, clip, zeros and overflow over parts, copies and groups of ranks.

Class *exact sums*: norm and zeros of small integers; *bitwise* for copies and skipped steps;
*numerical* where a tolerance is given. C17 on data-parallel ranks is in
`tests/distributed/test_nonfinite.py`, C15 without a clip too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megatron_lw
from tests.distributed.test_ddp import FusedModel
from tests.harness import run_ranks
from tests.regressions.given import (
    CONFIG,
    MUON,
    Tensors,
    backward,
    build,
    everything,
    same,
    weights,
)

Result = tuple[bool, float | None, int | None]


def dense_and_experts(
    sizes: dict[str, int], config: dict[str, Any], dense: list[float], experts: list[list[float]]
) -> tuple[Result, Tensors]:
    """Averaged gradients: a dense row on all ranks, an expert's row on each."""
    groups = megatron_lw.ParallelGroups.create(**sizes)
    expert = f"e{groups.ep.rank}_weight"
    own = torch.tensor(experts[groups.ep.rank])
    grads = {"dense_weight": torch.tensor([dense]), expert: own[None] * groups.dp.size}
    built = build(
        {name: torch.ones(grad.shape) for name, grad in grads.items()},
        config=config,
        tags={expert: {"expert": True}},
        **sizes,
    )
    backward(built, grads)
    return built[1].step(), weights(built)


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adam", "muon"])
def test_c1_dense_and_expert_matrices_of_one_optimizer(config: dict[str, Any]) -> None:
    """NVIDIA/Megatron-LM#3024: norm and zero count: 3, 4 and 12 make 13; one zero each."""
    arguments = ({"expert": 2}, config, [3.0, 0.0], [[4.0, 0.0], [12.0, 0.0]])
    for (success, norm, zeros), _ in run_ranks(dense_and_experts, 2, *arguments):
        assert success
        assert norm == 13.0 and zeros == 3


def experts_without_tensor_parallelism(expert: list[float], bias: float) -> Result:
    sizes = {"tensor": 4, "expert": 4, "expert_tensor": 1}
    rank = megatron_lw.ParallelGroups.create(**sizes).ep.rank
    values = {
        f"e{rank}_weight": torch.ones(1, 2),
        f"e{rank}_bias": torch.ones(1),
        "dense_bias": torch.ones(1),
    }
    tags = {name: {"expert": True} for name in values if name != "dense_bias"}
    built = build(values, config=MUON, tags=tags, **sizes)
    grads = (torch.tensor([expert]), torch.tensor([bias]), torch.tensor([3.0]))
    backward(built, dict(zip(values, grads, strict=True)))
    return built[1].step()


def test_c2_c3_c4_experts_that_tensor_parallelism_does_not_divide() -> None:
    """NVIDIA/Megatron-LM#5916, #6099, radixark/Megatron-LM#80: T4 E4 ET1 was counted too low."""
    for success, norm, zeros in run_ranks(experts_without_tensor_parallelism, 4, [1.0, 1.0], 2.0):
        assert success
        assert norm == pytest.approx(math.sqrt(4 * 2 + 4 * 4 + 9), rel=1e-7) and zeros == 0
    for _, norm, zeros in run_ranks(experts_without_tensor_parallelism, 4, [0.0, 1.0], 0.0):
        assert norm == pytest.approx(math.sqrt(4 + 9), rel=1e-7) and zeros == 4 + 4


def test_c5_c6_one_norm_clips_dense_and_expert_parameters() -> None:
    """NVIDIA/Megatron-LM#785, NeMo/Automodel#3816: each group clipped by a norm of its own."""
    config = {**CONFIG, "clip_grad": 1.0, "adam_eps": 1.0}
    arguments = ({"expert": 2}, config, [1.0], [[40.19], [3.9]])
    results = run_ranks(dense_and_experts, 2, *arguments)
    for (success, norm, _), _ in results:
        assert success
        assert norm == pytest.approx(math.sqrt(1 + 40.19**2 + 3.9**2), rel=1e-6)
        assert norm == pytest.approx(40.391, abs=5e-4)
    first, second = (weight["dense_weight"] for _, weight in results)
    assert torch.equal(first, second)
    # Adam's first step is lr g / (g + eps), so that with eps = 1 it shows the clipped gradient.
    clipped = 1 / 40.391
    torch.testing.assert_close(first, torch.full((1, 1), 1 - 0.1 * clipped / (clipped + 1)))


def tied_alone() -> Result:
    built = build(
        {"words_weight": torch.ones(1, 2)},
        tags={"words_weight": {"tied": "embedding", "embedding": True}},
        pipeline=2,
    )
    backward(built, {"words_weight": torch.full((1, 2), 10.0)})
    return built[1].step()


def test_c8_a_tied_weight_is_counted_on_one_stage() -> None:
    """NVIDIA/Megatron-LM#7227, #7228: [20, 20], summed over both stages, is 28.284 and not 40."""
    for success, norm, zeros in run_ranks(tied_alone, 2):
        assert success and zeros == 0
        assert norm == pytest.approx(20 * math.sqrt(2), rel=1e-7)


def fused_gradients(fused: bool) -> float | None:
    groups = megatron_lw.ParallelGroups.create()
    ddp = megatron_lw.DistributedDataParallel(FusedModel(fused), groups)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    optimizer.zero_grad()
    ddp(torch.ones(4, 8)).backward()
    return optimizer.step()[1]


def test_c10_gradients_that_layers_accumulate_themselves_are_in_the_norm() -> None:
    """NVIDIA/Megatron-LM!3478, #4802: the norm read one place, the gradient was in another."""
    by_layer, by_autograd = (run_ranks(fused_gradients, 2, fused)[0] for fused in (True, False))
    assert by_layer == pytest.approx(by_autograd, rel=1e-5)
    assert by_layer > 1.0


def many_zeros() -> int | None:
    groups = megatron_lw.ParallelGroups.create(expert=2)
    name, numel = (("e0_bias", 2**24), ("e1_bias", 1))[groups.ep.rank]
    values = {name: torch.zeros(numel, dtype=torch.bfloat16)}
    built = build(values, config={**CONFIG, "bf16": True}, tags={name: {"expert": True}}, expert=2)
    backward(built, {})
    return built[1].step()[2]


def test_c12_zeros_are_counted_as_integers() -> None:
    """NVIDIA/Megatron-LM#4015: in float32 the count stops at 2**24."""
    assert torch.tensor(2.0**24) + 1 == 2**24
    assert run_ranks(many_zeros, 2) == [2**24 + 1] * 2


def one_matrix() -> tuple[Result, dict[str, dict[str, int]]]:
    built = build({"a_weight": torch.ones(4, 4)}, config={**MUON, "clip_grad": 1.0})
    backward(built, {"a_weight": torch.eye(4)})
    result = built[1].step()
    groups = built[0].groups
    used = {name: getattr(groups, name) for name in ("dp", "tp_dp", "grad_stats", "control")}
    return result, {name: dict(group.traffic.calls) for name, group in used.items()}


def test_c13_ranks_that_hold_nothing_make_the_same_calls() -> None:
    """NVIDIA/Megatron-LM!3918, NVIDIA-NeMo/Megatron-Bridge#852, #4998: some ranks hung."""
    (first, calls), *others = run_ranks(one_matrix, 3)
    assert first[0] and first[1] == 2.0 and first[2] == 12
    assert calls["grad_stats"]["all_reduce"] == 1 and calls["dp"]["reduce_scatter"] == 1
    assert all(result == first and other == calls for result, other in others)


def update_norm(scale: float, config: dict[str, Any]) -> tuple[float, Tensors]:
    built = build({"a_weight": torch.zeros(64, 64)}, config=config)
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    backward(built, {"a_weight": scale * grad / grad.norm()})
    norm = built[1].step()[1]
    return float(norm or 0.0), weights(built)


@pytest.mark.parametrize("norm", [5e7, 2e11, 1e18])
def test_c15_a_huge_norm_does_not_clip_an_update_to_nothing(norm: float) -> None:
    """NVIDIA/Megatron-LM#5394, #5395, EO#229, #230: clipped below the iteration's epsilon."""
    config = {**MUON, "clip_grad": 1e-6}
    found, clipped = run_ranks(update_norm, 2, norm, config)[0]
    _, plain = run_ranks(update_norm, 2, 1.0, MUON)[0]
    assert found == pytest.approx(norm, rel=1e-5)
    sizes = [float(weight["a_weight"].norm()) for weight in (clipped, plain)]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-2) and sizes[1] > 1.0


def test_c16_the_clip_acts_on_gradients_and_not_on_updates() -> None:
    """DeepSpeed#8439, #7776: updates were divided by their own norm. Class bitwise."""
    clipped = run_ranks(update_norm, 2, 0.5, {**MUON, "clip_grad": 1.0})
    plain = run_ranks(update_norm, 2, 0.5, MUON)
    for (norm, ours), (_, theirs) in zip(clipped, plain, strict=True):
        assert norm == pytest.approx(0.5, rel=1e-5)
        assert torch.equal(ours["a_weight"], theirs["a_weight"])
        assert float(ours["a_weight"].norm()) > 1.0


def overflow(name: str, rank: int) -> tuple[Result, bool, bool]:
    """Whether a skipped step changed anything, and whether the next one ever saw it."""
    sizes = {"tensor": 2, "expert": 2, "expert_tensor": 1}
    groups = megatron_lw.ParallelGroups.create(**sizes)
    expert = f"e{groups.ep.rank}_weight"
    values = {"a_weight": torch.ones(4, 8), "v_bias": torch.ones(5), expert: torch.ones(4, 4)}
    values["copied_bias"] = torch.ones(5)
    tags = {"a_weight": {"tp_dim": 0}, "v_bias": {"tp_dim": 0}, expert: {"expert": True}}
    config = {**MUON, "clip_grad": 1.0, "on_nonfinite": "skip"}
    built, clean = (build(values, config=config, tags=tags, **sizes) for _ in range(2))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + groups.world.rank)
        grads = {n: torch.randn(v.shape, generator=generator) for n, v in values.items()}
        if step == 1:
            before = everything(built)
            hurt = {"expert": expert}.get(name, name)
            if groups.world.rank == rank:
                grads[hurt].view(-1)[3] = math.inf
            backward(built, grads)
            result = built[1].step()
            unchanged = same(before, everything(built))
        else:
            for each in (built, clean):
                backward(each, grads)
                assert each[1].step()[0]
    return result, unchanged, same(everything(built), everything(clean))


@pytest.mark.parametrize(
    ("name", "rank"), [("a_weight", 0), ("v_bias", 1), ("expert", 1), ("copied_bias", 1)]
)
def test_c17_an_overflow_on_one_rank_enters_no_momentum(name: str, rank: int) -> None:
    """DeepSpeed#8432, #8435: the momentum was NaN ever after. Class bitwise, T2 E2 ET1.

    Of tensor-parallel copies the norm counts the first; an overflow is found in any of them.
    """
    for (success, norm, _), unchanged, never_seen in run_ranks(overflow, 2, name, rank):
        assert success is False and norm is None
        assert unchanged and never_seen


def overflow_in_one_child(name: str) -> tuple[list[tuple[bool, float]], bool, list[int]]:
    """FP16 under three children; the gradient of one parameter overflows on the last rank."""
    values = {"a_weight": (24, 16), "b_bias": (70,), "c_weight": (16, 8)}
    overrides = {megatron_lw.ParamKey(name="c_*"): {"optimizer": "sgd"}}
    config = {**MUON, "fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1}
    built = build(
        {n: torch.ones(shape, dtype=torch.float16) for n, shape in values.items()},
        config={**config, "loss_scale_window": 1000},
        overrides=overrides,  # type: ignore[arg-type]
    )
    ddp, optimizer = built
    rank, found, unchanged = ddp.groups.dp.rank, [], False
    for step in range(3):
        optimizer.zero_grad()
        grads = {n: torch.full(shape, 1.0 + rank) for n, shape in values.items()}
        if step == 1 and rank == ddp.groups.dp.size - 1:
            grads[name].view(-1)[2] = 3e4  # times the loss scale it leaves FP16
        before = everything(built)
        optimizer.scale_loss(ddp(grads)).backward()
        success, _, _ = optimizer.step()
        found.append((success, float(optimizer.get_loss_scale())))
        if step == 1:
            unchanged = same(before, everything(built))
    return found, unchanged, [child.num_steps for child in optimizer.runtime.children]


@pytest.mark.parametrize("name", ["a_weight", "b_bias", "c_weight"])
def test_c19_children_share_one_loss_scale_and_one_decision(name: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5591: each child had a scale of its own: [4.0, 8.0]."""
    for found, unchanged, steps in run_ranks(overflow_in_one_child, 3, name):
        assert found == [(True, 8.0), (False, 4.0), (True, 4.0)]
        assert unchanged and steps == [2, 2, 2]
