"""Reports of sections A, F and G about who gets what: empty ranks, routing, tied copies, settings.

Class *bitwise* where copies or runs are compared, else exact. A1, A7, A8 and E14 are in
`test_ranks`; A5, A11, A14, A16, and the plans of A7 and A8, have files of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatron_lw
from tests.distributed.cases import Bag, integer_grads
from tests.harness import expect_failure_on_all, run_ranks
from tests.regressions.given import CONFIG, MUON, Built, Tensors, backward, build, weights


def two_matrices() -> tuple[list[int], list[int], Tensors]:
    values = {"a_weight": torch.ones(8, 8), "b_weight": torch.ones(8, 8)}
    built = build(values, config=MUON)
    backward(built, {name: torch.eye(8) for name in values})
    built[1].step()
    held = [len(list(bucket.row_slots())) for bucket in built[0].buckets]
    return held, [len(group["params"]) for group in built[1].param_groups], weights(built)


def test_a3_a_rank_that_owns_nothing_has_its_group_all_the_same() -> None:
    """pytorch#62481: an optimizer cannot be made from an empty list of parameters."""
    results = run_ranks(two_matrices, 3)
    assert [held for held, _, _ in results] == [[1], [1], [0]]
    for _, groups, weight in results:
        assert groups == [2]
        assert torch.equal(weight["a_weight"], results[0][2]["a_weight"])
        assert not torch.equal(weight["a_weight"], torch.ones(8, 8))


def tied_copies(tag_both: bool) -> list[torch.Tensor]:
    """Megatron's attributes: the last stage's copy lacks that of embeddings."""
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    first = groups.pp.rank == 0
    name = "embedding" if first else "output_layer"
    other = f"layer{groups.pp.rank}"
    shapes = {name: (16, 8), other: (8, 8)}
    model = Bag({}, torch.float32)
    for each, shape in shapes.items():
        model.register_parameter(each, nn.Parameter(torch.ones(shape)))
    model.get_parameter(name).shared_embedding = True
    if first or tag_both:
        model.get_parameter(name).is_embedding_or_output_parameter = True
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**MUON), [ddp])
    found = []
    for step in range(3):
        grads = integer_grads({name: (16, 8), other: (8, 8)}, groups.world.rank, step)
        backward((ddp, optimizer), grads)
        optimizer.step()
        found.append(model.get_parameter(name).detach().clone())
    children = {route.info.name: route.child for route in optimizer.runtime.routing.routes}
    return [*found, torch.tensor([children[name] == "adam", children[other] == "muon"])]


@pytest.mark.parametrize("tag_both", [False, True])
def test_a12_both_copies_of_a_tied_embedding_have_the_same_child(tag_both: bool) -> None:
    """NVIDIA/Megatron-LM#4641, #4642, #5034: Muon stepped one copy and Adam the other."""
    first, last = run_ranks(tied_copies, 2, tag_both)
    assert first[-1].tolist() == last[-1].tolist() == [True, True]
    for a, b in zip(first, last, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1])


def contradicting_copies() -> None:
    first = megatron_lw.ParallelGroups.create(pipeline=2).pp.rank == 0
    build(
        {"words_weight": torch.ones(8, 8)},
        config=MUON,
        tags={"words_weight": {"tied": "words", "embedding": first}},
        pipeline=2,
    )


def test_a12_copies_that_are_described_differently_are_refused() -> None:
    """The same, with this library's own tags: nothing is guessed."""
    text = "copies of tied weights differ"
    expect_failure_on_all(contradicting_copies, 2, megatron_lw.PlanMismatchError, text)


def children_by_name(built: Built) -> dict[str, dict[str, str]]:
    """Who steps each parameter, by the routing table, by its bucket and by its group."""
    runtime = built[1].runtime
    (plan,) = runtime.plans.values()
    by_bucket = {
        plan.params[index].name: bucket.child for bucket in plan.buckets for index in bucket.params
    }
    names = {id(param): name for name, param in built[0].module.named_parameters()}
    by_group = {
        names[id(param)]: group["optimizer"]
        for group in built[1].param_groups
        for param in group["params"]
    }
    by_route = {route.info.name: route.child for route in runtime.routing.routes}
    return {"route": by_route, "bucket": by_bucket, "group": by_group}


def opted_out() -> dict[str, dict[str, str]]:
    values = {"a_weight": torch.ones(64, 64), "b_weight": torch.ones(64, 64)}
    return children_by_name(build(values, config=MUON, tags={"a_weight": {"use_muon": False}}))


def test_a13_buffer_and_child_are_decided_by_one_table() -> None:
    """NVIDIA/Megatron-LM#6642: a matrix marked "not Muon" was in Muon's buffer."""
    expected = {"a_weight": "adam", "b_weight": "muon"}
    for found in run_ranks(opted_out, 2):
        assert found == {"route": expected, "bucket": expected, "group": expected}


def factory(path: str) -> list[str]:
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.OptimizerConfig(**CONFIG)
    calls: list[dict[str, Any]] = [
        {},
        {"config_overrides": None, "use_gloo_process_groups": False},
        {"pg_collection": groups, "dump_param_to_param_group_map": path},
    ]
    made = []
    for keywords in calls:
        ddp = megatron_lw.DistributedDataParallel(Bag({"a_weight": (4, 4)}, torch.float32), groups)
        optimizer = megatron_lw.get_megatron_optimizer(
            config=config, model_chunks=[ddp], **keywords
        )
        made.append(optimizer.param_groups[0]["name"])
    return made


def test_a19_the_factory_takes_every_keyword_that_megatron_passes(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#4156, #4157: callers broke as a keyword was removed."""
    path = tmp_path / "groups.txt"
    assert run_ranks(factory, 2, str(path)) == [["adam/dense"] * 3] * 2
    assert "a_weight" in path.read_text()


OLDER: list[dict[str, Any]] = [
    {"no_weight_decay_cond": None, "scale_lr_cond": None, "lr_mult": 1.0},  # core 0.6 to 0.10
    {"lr_mult": 1.0, "use_gloo_process_groups": True},  # 0.11, 0.12
    {"default_skip_embedding_weight_decay": False, "pg_collection": None},  # 0.13, 0.14
    {"layer_wise_distributed_optimizer": True},  # of get_megatron_muon_optimizer, 0.15
]
REPLACED: list[tuple[dict[str, Any], str]] = [
    ({"no_weight_decay_cond": max}, "no_weight_decay_cond.*config_overrides.*wd_mult"),
    ({"scale_lr_cond": max}, "scale_lr_cond.*config_overrides.*max_lr"),
    ({"lr_mult": 0.5}, "lr_mult=0.5.*config_overrides.*max_lr"),
    ({"default_skip_embedding_weight_decay": True}, "skip_embedding.*wd_mult"),
    ({"layer_wise_distributed_optimizer": False}, "layer_wise.*always spread"),
    ({"config_overrides": max}, "builtin_function.*no_weight_decay_cond.*wd_mult"),
]


def call_factory(keywords: dict[str, Any]) -> str:
    groups = megatron_lw.ParallelGroups.create()
    ddp = megatron_lw.DistributedDataParallel(Bag({"a_weight": (4, 4)}, torch.float32), groups)
    config = megatron_lw.OptimizerConfig(**CONFIG)
    made = megatron_lw.get_megatron_optimizer(config, [ddp], **keywords)
    return str(made.param_groups[0]["name"])


def test_a19_arguments_of_earlier_releases_are_accepted_or_their_replacement_is_named() -> None:
    """The same reports: a TypeError told callers nothing of what to do."""
    for keywords in OLDER:
        assert run_ranks(call_factory, 2, keywords) == ["adam/dense"] * 2
    for keywords, text in REPLACED:
        expect_failure_on_all(call_factory, 2, megatron_lw.ConfigError, text, keywords)
    expect_failure_on_all(
        call_factory, 1, TypeError, "unexpected.*'no_such_thing'", {"no_such_thing": 1}
    )


def frozen_stage() -> tuple[list[Any], list[str], bool]:
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    name = f"stage{groups.pp.rank}_weight"
    model = Bag({name: (8, 8)}, torch.float32)
    model.get_parameter(name).requires_grad_(groups.pp.rank == 1)
    before = model.get_parameter(name).detach().clone()
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**MUON), [ddp])
    results = []
    for _ in range(2):
        backward((ddp, optimizer), {name: torch.eye(8)} if groups.pp.rank else {})
        results.append(optimizer.step())
    ddp.start_param_sync()
    optimizer.reload_model_params()
    unchanged = torch.equal(before, model.get_parameter(name))
    return results, [group["name"] for group in optimizer.param_groups], unchanged


def test_f19_a_stage_with_nothing_to_train_takes_part_in_everything() -> None:
    """NVIDIA/Megatron-LM!2285, !2523: its optimizer was None, and callers crashed."""
    frozen, trained = run_ranks(frozen_stage, 2)
    assert frozen[:2] == trained[:2]
    assert [success for success, _, _ in trained[0]] == [True, True]
    assert trained[0][0][1] == pytest.approx(8**0.5, rel=1e-6)
    assert frozen[2] and not trained[2]


def expert_on_the_last_rank() -> tuple[tuple[bool, float | None, int | None], int, list[str]]:
    groups = megatron_lw.ParallelGroups.create(expert=2)
    mine = {"e1_weight": torch.ones(8, 8)} if groups.ep.rank == 1 else {}
    built = build(mine, config=MUON, tags={name: {"expert": True} for name in mine}, expert=2)
    backward(built, {name: 2 * torch.eye(8) for name in mine})
    result = built[1].step()
    names = [group["name"] for group in built[1].param_groups]
    return result, len(built[0].buckets), names


def test_g1_g3_the_first_rank_holds_nothing_at_all() -> None:
    """Read from Megatron's code: rank 0's list decided device, dtype and whether there is any."""
    (first, nothing, names), (second, one, others) = run_ranks(expert_on_the_last_rank, 2)
    assert (nothing, one) == (0, 1)
    assert names == others == ["muon/expert"]
    assert first == second
    assert first[0] and first[1] == pytest.approx(8**0.5, rel=1e-6) and first[2] == 56


def two_dtypes(lr: float) -> Tensors:
    fine = 1 + 2.0**-20
    values = {"a_bias": torch.full((40,), fine).bfloat16(), "b_bias": torch.full((40,), fine)}
    config = {**CONFIG, "bf16": True, "lr": lr, "weight_decay": 0.0}
    built = build(values, config=config)
    backward(built, {name: torch.ones(40) for name in values})
    built[1].step()
    assert len(built[0].buckets) == 1
    return weights(built)


def test_g2_bf16_and_fp32_weights_of_one_bucket_keep_their_dtypes() -> None:
    """Read from Megatron's code: flattening promoted one and rounded the other."""
    for weight in run_ranks(two_dtypes, 2, 0.0):
        assert weight["a_bias"].dtype == torch.bfloat16
        assert set(weight["a_bias"].tolist()) == {1.0}
        assert set(weight["b_bias"].tolist()) == {1 + 2.0**-20}
    for weight in run_ranks(two_dtypes, 2, 0.5):  # Adam's first step is the rate
        assert set(weight["a_bias"].tolist()) == {0.5}
        [stepped] = set(weight["b_bias"].tolist())
        assert stepped == pytest.approx(0.5, rel=1e-5) and stepped != 0.5


SETTINGS: list[dict[str, Any]] = [
    {},
    {"average_in_collective": True, "overlap_grad_reduce": True},
    {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True},
]


def models_in_one_process(together: bool) -> list[torch.Tensor]:
    """Three models with settings of their own, stepped by turns or one after another."""
    config = {**CONFIG, "bf16": True}
    values = {"a_weight": torch.ones(16, 16).bfloat16()}

    def make(settings: dict[str, Any]) -> Built:
        return build(values, config=config, ddp_config=settings)

    def step(built: Built, number: int) -> None:
        shapes = {"a_weight": (16, 16)}
        backward(built, integer_grads(shapes, built[0].groups.dp.rank, number))
        built[1].step()

    if together:
        models = [make(settings) for settings in SETTINGS]
        for number in range(3):
            for built in models:
                step(built, number)
        return [weights(built)["a_weight"] for built in models]
    found = []
    for settings in SETTINGS:
        built = make(settings)
        for number in range(3):
            step(built, number)
        found.append(weights(built)["a_weight"])
    return found


def test_g6_models_with_different_settings_do_not_touch_each_other() -> None:
    """Read from Megatron's code: one model's settings rebound a function for all of them."""
    together = run_ranks(models_in_one_process, 2, True)
    alone = run_ranks(models_in_one_process, 2, False)
    for a, b in zip(together, alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert not torch.equal(a[0], torch.ones(16, 16).bfloat16())
