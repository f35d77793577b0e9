"""Reports of section D: what a child does to its parameters, and by whose settings.

Class *bitwise* where copies are compared or nothing may change, else *numerical*.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from tests.distributed.cases import integer_grads
from tests.harness import run_ranks
from tests.regressions.given import CONFIG, MUON, Tensors, backward, build, weights


def zero_gradients(given: bool) -> tuple[Tensors, float | None]:
    values = {"a_weight": torch.full((16, 24), 3.0), "b_bias": torch.full((33,), 3.0)}
    built = build(values, config={**MUON, "weight_decay": 0.5, "clip_grad": 1.0})
    grads = {name: torch.zeros(value.shape) for name, value in values.items()}
    norm = None
    for _ in range(2):
        backward(built, grads if given else {})
        norm = built[1].step()[1]
    return weights(built), norm


@pytest.mark.parametrize("given", [True, False], ids=["zeros", "none"])
def test_d1_a_zero_gradient_updates_nothing_and_decays(given: bool) -> None:
    """microsoft/dion#24: 0/0. Biases are not decayed. Class bitwise."""
    decayed = torch.full((16, 24), 3.0).mul(1 - 0.1 * 0.5).mul(1 - 0.1 * 0.5)
    for weight, norm in run_ranks(zero_gradients, 2, given):
        assert norm == 0.0
        assert torch.equal(weight["a_weight"], decayed)
        assert torch.equal(weight["b_bias"], torch.full((33,), 3.0))


MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"grad_reduce_in_fp32": False}),
    (torch.bfloat16, {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}),
    (torch.bfloat16, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    (torch.bfloat16, {"average_in_collective": True}),
]


def rank_one_updates() -> list[tuple[list[float], float, float]]:
    found = []
    for dtype, ddp_config in MODES:
        config = {**MUON, "bf16": dtype == torch.bfloat16, "muon_scale_mode": "shape_scaling"}
        built = build(
            {"a_weight": torch.zeros(16, 24, dtype=dtype)}, config=config, ddp_config=ddp_config
        )
        grad = torch.outer(torch.arange(1.0, 17.0), torch.ones(24))
        with torch.no_grad():
            before = float(built[0]({"a_weight": grad}))
        backward(built, {"a_weight": grad})
        built[1].step()
        with torch.no_grad():
            after = float(built[0]({"a_weight": grad}))
        update = weights(built)["a_weight"].float() / -0.1
        found.append((torch.linalg.svdvals(update).tolist(), before, after))
    return found


def test_d5_every_mode_orthogonalises_and_its_update_reaches_the_forward() -> None:
    """DeepSpeed#8441, #8442, ML#5707: plain SGD under Muon's name, or an update that was lost."""
    for modes in run_ranks(rank_one_updates, 2):
        assert len(modes) == len(MODES)
        for singular, before, after in modes:
            assert 0.7 < singular[0] < 1.3 and max(singular[1:]) < 0.05
            assert before == 0.0
            assert after < -10.0


def scheduled() -> tuple[list[str], dict[str, float], list[int], bool, bool]:
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    stage = groups.pp.rank
    values = {f"m{stage}_weight": torch.ones(8, 8), f"still{stage}_weight": torch.ones(8, 8)}
    if stage == 0:
        values["v_bias"] = torch.ones(8)
    overrides: dict[megatron_lw.ParamKey, megatron_lw.ParamGroupOverride] = {
        megatron_lw.ParamKey(name="v_*"): {"max_lr": 3e-4},
        megatron_lw.ParamKey(name="still*"): {"max_lr": 0.0},
    }
    built = build(values, config={**MUON, "lr": 0.02}, overrides=overrides, pipeline=2)
    optimizer = built[1]
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
    backward(built, {name: torch.ones(value.shape) for name, value in values.items()})
    optimizer.step()
    schedule.step()
    weight = weights(built)
    still = torch.equal(weight[f"still{stage}_weight"], torch.ones(8, 8))
    moved = not torch.equal(weight[f"m{stage}_weight"], torch.ones(8, 8))
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return [group["name"] for group in optimizer.param_groups], rates, sizes, still, moved


def test_d6_d7_groups_keep_their_rates_under_a_schedule_also_where_they_are_empty() -> None:
    """DeepSpeed#8440, #7713, tt-metal#56027, DeepSpeedExamples#756: rates lost or swapped."""
    first, second = run_ranks(scheduled, 2)
    assert first[:2] == second[:2]
    assert first[2] == [1, 1, 1] and second[2] == [0, 1, 1], "no group is left out"
    assert first[1] == pytest.approx(
        {"muon/dense": 0.01, "adam/dense/max_lr=0.0003": 1.5e-4, "muon/dense/max_lr=0.0": 0.0}
    )
    assert all(still and moved for _, _, _, still, moved in (first, second))


def with_an_empty_tensor(empty: str) -> tuple[Tensors, list[int]]:
    values = {"m_bias": torch.ones(4), empty: torch.ones(0)}
    built = build(values)
    backward(built, {"m_bias": torch.ones(4)})
    built[1].step()
    return weights(built), [len(group["params"]) for group in built[1].param_groups]


@pytest.mark.parametrize("empty", ["a_bias", "z_bias"], ids=["first", "last"])
def test_d9_a_tensor_without_elements_stops_no_update(empty: str) -> None:
    """TransformerEngine#3207, #3212, Automodel#2997, ML#7216: a fused kernel skipped the group."""
    for weight, groups in run_ranks(with_an_empty_tensor, 2, empty):
        assert groups == [2]
        torch.testing.assert_close(weight["m_bias"], torch.full((4,), 0.9))
        assert weight[empty].shape == (0,)


def tied_head() -> list[torch.Tensor]:
    stage = megatron_lw.ParallelGroups.create(pipeline=2).pp.rank
    name = ("embedding", "head")[stage]
    built = build(
        {name: torch.full((40, 8), float(1 + stage))},
        config={**CONFIG, "clip_grad": 1.0, "weight_decay": 0.1},
        tags={name: {"tied": "words", "embedding": True}},
        pipeline=2,
    )
    found = []
    for step in range(10):
        backward(built, integer_grads({name: (40, 8)}, stage, step))
        built[1].step()
        found.append(weights(built)[name])
    return found


def test_d13_a_tied_head_equals_the_embedding_at_every_step() -> None:
    """NVIDIA/Megatron-LM#656: the two drifted apart. They start apart here. Class bitwise."""
    first, last = run_ranks(tied_head, 2)
    assert len({float(weight.sum()) for weight in first}) == 10
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
