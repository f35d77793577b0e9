"""Reports of sections A, D, E and F about checkpoints; value = global element index.

Class *bitwise*. F2, F8 and F17 are in `test_resume`, F3 in `test_quantised`. Over every layout:
`tests/distributed/test_checkpoint.py`; tied names, D13 and F19 through checkpoints:
`tests/distributed/test_checkpoint_models.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw.dist_checkpointing import load, save
from megatron_lw.dist_checkpointing.directory import read_manifest
from tests.distributed.checkpoint_model_cases import Made, fill, make, states, wrong
from tests.harness import run_ranks
from tests.regressions.given import CONFIG, MUON, backward, build, everything, same, weights

Shapes = dict[str, tuple[int, ...]]


def numbers(shapes: Shapes) -> dict[str, int]:
    return {name: number for number, name in enumerate(shapes)}


def saved(root: Path, shapes: Shapes, frozen: tuple[str, ...], config: dict[str, Any]) -> None:
    made = make([shapes], frozen=frozen, **config)
    fill(made, numbers(shapes))
    for group in made[1].param_groups:
        group["lr"], group["weight_decay"] = 0.125, 0.5
    for child in made[1].runtime.children:
        child.num_steps = 9
    save(root, made[0], made[1], step=9)


def loaded(root: Path, shapes: Shapes, frozen: tuple[str, ...], config: dict[str, Any]) -> Any:
    made: Made = make([shapes], frozen=frozen, **config)
    load(root, made[0], made[1])
    made[1].check(collectives=True)
    groups = [(g["name"], g["lr"], g["weight_decay"]) for g in made[1].param_groups]
    steps = {child.num_steps for child in made[1].runtime.children}
    return wrong(made, numbers(shapes)), groups, steps, len(states(made))


CASES: dict[str, tuple[Shapes, tuple[str, ...], dict[str, Any], int, tuple[int, ...]]] = {
    "a1 DeepSpeed#129: fewer elements than ranks": ({"a": (2,)}, (), {}, 4, (4, 1)),
    "a4 NVIDIA/Megatron-LM#2255: a group that is empty on some ranks": (
        {**{f"m{i}_weight": (8, 8) for i in range(5)}, "v_bias": (8,)},
        (),
        {"optimizer": "muon"},
        4,
        (4, 2),
    ),
    "f10 NVIDIA/Megatron-LM#5077: several buckets with padding": (
        {f"p{i}": (70,) for i in range(3)}, (), {"bucket_size": 1}, 2, (3,),
    ),
    "f11 NVIDIA/Megatron-LM#5898: rows of padding only, and a frozen parameter": (
        {"a": (10,), "f": (3, 3)}, ("f",), {}, 4, (1, 3),
    ),
    "f23 pytorch#163480: ranks that own nothing": (
        {"a": (4, 4), "b": (4, 4)}, (), {"optimizer": "muon"}, 3, (3, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", CASES)
def test_a1_a4_f10_f11_f23_everything_survives_whichever_rank_owns_it(
    tmp_path: Path, report: str
) -> None:
    shapes, frozen, config, before, after = CASES[report]
    run_ranks(saved, before, tmp_path, shapes, frozen, config)
    sizes = {t.key: t.shape for t in read_manifest(tmp_path / "step-0000000009").tensors}
    assert {key.split("/")[0]: shape for key, shape in sizes.items()} == shapes
    for ranks in after:
        found = run_ranks(loaded, ranks, tmp_path, shapes, frozen, config)
        assert sum(count for *_, count in found) >= len(shapes) - len(frozen)
        for bad, groups, steps, _ in found:
            assert bad == []
            assert groups and all(tuple(rest) == (0.125, 0.5) for _, *rest in groups)
            assert steps == {9}


def forced_sync(root: Path) -> list[bool]:
    built = build({"a_weight": torch.ones(8, 8)}, config=MUON)
    before = everything(built)
    found = []
    for gradient in (False, True):
        if gradient:
            backward(built, {"a_weight": torch.full((8, 8), 3.0)})
        for _ in range(2):
            built[0].start_param_sync()
            built[0].finish_param_sync()
        save(root, *built, step=1)
        found.append(same(before, everything(built)))
    other = build({"a_weight": torch.zeros(8, 8)}, config=MUON)
    load(root, *other)
    found.append(same(before, everything(other)))
    return found


def test_e4_a_forced_sync_and_a_save_before_any_step_change_nothing(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#5236: the staging area was the gradient buffer."""
    for found in run_ranks(forced_sync, 2, tmp_path):
        assert found == [True] * 3


def order_of_groups(root: Path) -> tuple[list[str], list[str], list[float]]:
    overrides = {
        megatron_lw.ParamKey(name=f"p{i}"): {"max_lr": 0.1 + i, "wd_mult": 0.5} for i in range(11)
    }
    values = {f"p{i}": torch.ones(3) for i in reversed(range(11))}
    built, other = (build(values, overrides=overrides) for _ in range(2))
    for number, group in enumerate(built[1].param_groups):
        group["lr"] = float(number)
    save(root, *built, step=0)
    before = [group["name"] for group in other[1].param_groups]
    load(root, *other)
    after = [group["name"] for group in other[1].param_groups]
    return before, after, [group["lr"] for group in other[1].param_groups]


def test_f5_g5_groups_keep_their_order_and_are_found_by_name(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM!3385, and read from its code: keys were sorted as text."""
    for before, after, rates in run_ranks(order_of_groups, 2, tmp_path):
        assert before == after and len(before) == 11
        assert rates == [float(number) for number in range(11)]


def load_at_once(root: Path) -> tuple[bool, float]:
    grads = {"a_weight": torch.arange(64.0).view(8, 8), "b_bias": torch.ones(5)}
    values = {"a_weight": torch.ones(8, 8), "b_bias": torch.ones(5)}
    built = build(values, config=MUON)
    backward(built, grads)
    built[1].step()
    save(root, *built, step=1)
    other = build({n: torch.zeros_like(v) for n, v in values.items()}, config=MUON)
    load(root, *other)
    for each in (built, other):
        backward(each, grads)
        each[1].step()
    moved = float((weights(other)["a_weight"] - values["a_weight"]).abs().max())
    return same(everything(built), everything(other)), moved


def test_f13_a_load_before_any_step_brings_the_momentum(tmp_path: Path) -> None:
    """inclusionAI/AReaL#1468: the state did not exist yet, and was dropped."""
    for equal, moved in run_ranks(load_at_once, 2, tmp_path):
        assert equal and moved > 0


def momentum_bits(root: Path) -> list[tuple[str, bool]]:
    values = {"a_weight": torch.ones(8, 8).bfloat16(), "b_bias": torch.ones(5).bfloat16()}
    built, other = (build(values, config={**MUON, "bf16": True}) for _ in range(2))
    exact = 1 + 2.0**-20
    for child in built[1].runtime.children:
        for bucket in range(child.num_buckets):
            for row in child.state_rows(bucket).values():
                row.fill_(exact)
    save(root, *built, step=1)
    load(root, *other)
    found = []
    for held in megatron_lw.optimizer.held.held_buckets(other[1].runtime):
        for row in held.states.values():
            for _, slot in held.bucket.row_slots():
                part = row[slot.row_start : slot.row_start + slot.numel]
                found.append((str(part.dtype), bool((part == exact).all())))
    return found


def test_f14_momentum_keeps_dtype_and_bits_beside_bf16_weights(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#7746: fp32 momentum was cast to the weights' dtype."""
    found = [each for rank in run_ranks(momentum_bits, 2, tmp_path) for each in rank]
    assert len(found) >= 3 and set(found) == {("torch.float32", True)}


def weights_alone(root: Path) -> list[float]:
    built = build({"a_weight": torch.full((8, 8), 5.0)})
    save(root, *built, step=1)
    other = build({"a_weight": torch.full((8, 8), 0.9)})
    load(root, *other, weights_only=True)
    found = [float(weights(other)["a_weight"].max())]
    backward(other, {"a_weight": torch.zeros(8, 8)})
    other[1].step()
    return [*found, float(weights(other)["a_weight"].max())]


def test_f20_weights_alone_refresh_the_masters(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#174: the first step went back to 0.9."""
    for found in run_ranks(weights_alone, 2, tmp_path):
        assert found == [5.0, 5.0]


def stages_then_one(root: Path, pipeline: int) -> tuple[list[str], list[str]]:
    """Two groups with equal numbers, told apart by name alone."""
    groups = megatron_lw.ParallelGroups.create(pipeline=pipeline)
    names = ["a_weight", "b_weight", "c_bias", "d_bias"]
    mine = names if pipeline == 1 else names[groups.pp.rank :: 2]
    shapes = {n: (8, 6) if "weight" in n else (7,) for n in mine}
    made = make([shapes], groups=groups, **{**CONFIG, "optimizer": "muon"})
    order = {name: number for number, name in enumerate(names)}
    if pipeline == 1:
        fill(made, order)
        save(root, made[0], made[1], step=1)
    else:
        load(root, made[0], made[1])
    return wrong(made, order) if pipeline > 1 else [], [g["name"] for g in made[1].param_groups]


def test_f1_groups_do_not_depend_on_the_pipeline(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#2625: groups were identified by numbers, or by pipeline layout."""
    [(_, one)] = run_ranks(stages_then_one, 1, tmp_path, 1)
    for bad, names in run_ranks(stages_then_one, 2, tmp_path, 2):
        assert bad == [] and names == one
