"""Bad input is refused at construction, on every rank, before anything can hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw import ConfigError, PlanMismatchError
from tests.distributed.cases import Bag, build
from tests.harness import expect_failure_on_all, run_ranks

SHAPES = {"a_weight": (24, 40), "b_bias": (40,)}
MUON = {"optimizer": "muon", "lr": 0.05}


def make(shapes, config, **options):
    build(shapes, config, **options)


def make_per_rank(shapes_by_rank, configs_by_rank):
    rank = torch.distributed.get_rank()
    build(shapes_by_rank[rank], configs_by_rank[rank])


def test_different_models_on_two_ranks_name_the_parameter():
    other = {"a_weight": (24, 48), "b_bias": (40,)}
    for text in expect_failure_on_all(
        make_per_rank, 2, PlanMismatchError, "a_weight", [SHAPES, other], [MUON, MUON]
    ):
        assert "24, 40" in text and "24, 48" in text


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_parameter_more_on_one_rank(odd):
    shapes = [dict(SHAPES) for _ in range(3)]
    shapes[odd] = {**SHAPES, "z_extra": (3,)}
    expect_failure_on_all(make_per_rank, 3, PlanMismatchError, "z_extra", shapes, [MUON] * 3)


def test_different_settings_on_two_ranks_name_the_setting():
    configs = [MUON, {**MUON, "muon_nesterov": True}]
    expect_failure_on_all(
        make_per_rank, 2, PlanMismatchError, "muon_nesterov", [SHAPES, SHAPES], configs
    )


def test_a_bad_setting_on_one_rank_only_raises_on_all():
    shapes = [SHAPES, SHAPES]
    configs = [MUON, {"lr": None}]
    expect_failure_on_all(make_per_rank, 2, Exception, "", shapes, configs)


def test_no_learning_rate():
    expect_failure_on_all(make, 2, ConfigError, "learning rate", SHAPES, {})


def not_wrapped():
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.OptimizerConfig(**MUON)
    megatron_lw.get_megatron_optimizer(config, [Bag(SHAPES, torch.float32)], pg_collection=groups)


def test_model_not_wrapped():
    expect_failure_on_all(not_wrapped, 2, ConfigError, "DistributedDataParallel")


def wrong_size(field):
    created = megatron_lw.ParallelGroups.create()
    values = {f: getattr(created, f) for f in created.__dataclass_fields__}
    values[field] = megatron_lw.ParallelGroups.single().tp
    megatron_lw.ParallelGroups(**values)


@pytest.mark.parametrize("field", ["dp", "world", "tp_dp", "expert_dp", "grad_stats", "replicas"])
def test_groups_of_the_wrong_size(field):
    expect_failure_on_all(wrong_size, 2, ConfigError, "rank", field)


def divide(**sizes):
    megatron_lw.ParallelGroups.create(**sizes)


def divide_by(name, size):
    divide(**{name: size})


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context", "expert"])
def test_sizes_that_do_not_divide_the_world(name):
    expect_failure_on_all(divide_by, 3, ConfigError, "not divisible", name, 2)


def without_name_map():
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    build(SHAPES, MUON, groups=groups)


def test_two_stages_with_the_same_names_need_a_name_map():
    expect_failure_on_all(without_name_map, 2, ConfigError, "'a_weight' is used on two pipeline")


def test_bf16_weights_need_the_flag():
    expect_failure_on_all(_bf16, 2, ConfigError, "bf16")


def _bf16():
    build(SHAPES, MUON, dtype=torch.bfloat16)


def _fp16():
    build(SHAPES, MUON, dtype=torch.float16)


def test_fp16_weights():
    expect_failure_on_all(_fp16, 2, ConfigError, "float16")


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ({"tp_dim": 2}, "tp_dim"),
        ({"blocks": (20, 10)}, "sum to 30"),
        ({"blocks": (24, 0)}, "positive"),
        ({"matrices": 5}, "matrices = 5"),
        ({"logical_rows": 25}, "logical_rows"),
        ({"embedding": True, "output": True}, "both embedding and output"),
        ({"use_muon": True, "embedding": True}, "contradicts"),
        ({"expert": True, "sequence_parallel": True}, "exclude"),
    ],
)
def test_tags_that_contradict_the_shape_or_each_other(tag, text):
    with pytest.raises(ConfigError, match=text):
        megatron_lw.annotate(nn.Parameter(torch.zeros(24, 40)), **tag)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ({"use_muon": True}, "not a matrix"),
        ({"matrices": 2}, "no matrix"),
        ({"keep_fp32": True}, "bfloat16"),
    ],
)
def test_tags_that_contradict_a_bf16_vector(tag, text):
    with pytest.raises(ConfigError, match=text):
        megatron_lw.annotate(nn.Parameter(torch.zeros(24, dtype=torch.bfloat16)), **tag)


def test_megatron_tag_that_contradicts_the_shape():
    expect_failure_on_all(_bad_megatron_tag, 2, ConfigError, "partition_dim")


def _bad_megatron_tag():
    groups = megatron_lw.ParallelGroups.create()
    model = Bag(SHAPES, torch.float32)
    if groups.world.rank == 1:
        model.b_bias.tensor_model_parallel = True
        model.b_bias.partition_dim = 1
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**MUON), [ddp])


def test_all_matrices_sent_elsewhere():
    tags = {"a_weight": {"embedding": True}}
    expect_failure_on_all(_tagged, 2, ConfigError, "no matrix of the model is routed", tags)


def _tagged(tags):
    build(SHAPES, MUON, tags=tags)


def test_a_vector_forced_to_muon():
    expect_failure_on_all(_forced, 2, ConfigError, "b_bias", "b_bias")


def _forced(name):
    overrides = {megatron_lw.ParamKey(name=name): {"optimizer": "muon"}}
    build(SHAPES, MUON, config_overrides=overrides)


def test_two_overrides_that_disagree():
    expect_failure_on_all(_two_overrides, 2, ConfigError, "a_weight")


def _two_overrides():
    overrides = {
        megatron_lw.ParamKey(name="a_*"): {"wd_mult": 1.0},
        megatron_lw.ParamKey(name="*_weight"): {"wd_mult": 0.0},
    }
    build(SHAPES, MUON, config_overrides=overrides)


def shared_between_chunks():
    groups = megatron_lw.ParallelGroups.create()
    model = Bag(SHAPES, torch.float32)
    chunks = [megatron_lw.DistributedDataParallel(model, groups) for _ in range(2)]
    megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**MUON), chunks)


def test_two_chunks_that_share_a_parameter():
    expect_failure_on_all(shared_between_chunks, 2, ConfigError, "share")


def default_group_is_never_used():
    """Poison the default group after the groups are made; building and stepping must not care."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from tests.distributed.cases import integer_grads

    groups = megatron_lw.ParallelGroups.create()
    calls = []

    def poisoned():
        calls.append("default group")
        raise RuntimeError("the default process group was used")

    original = distributed_c10d._get_default_group
    distributed_c10d._get_default_group = poisoned
    rejected = False
    try:
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            rejected = True
        calls.clear()
        ddp, optimizer = build(SHAPES, MUON, groups=groups)
        optimizer.zero_grad()
        ddp(integer_grads(SHAPES, groups.dp.rank, 0)).backward()
        optimizer.step()
    finally:
        distributed_c10d._get_default_group = original
    return rejected, calls


def test_default_process_group_is_never_used():
    for rejected, calls in run_ranks(default_group_is_never_used, 2):
        assert rejected, "the poison must bite, or this test shows nothing"
        assert calls == []
