"""What users do to models around an optimizer: it works, or says which parameter and what to do."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw import ConfigError, PlanMismatchError, StateError
from tests.distributed.cases import Bag, build, integer_grads
from tests.harness import expect_failure_on_all, run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (100,)}
CONFIG = {"optimizer": "muon", "lr": 0.05, "weight_decay": 0.0, "clip_grad": 0.0}


def step_once(ddp, optimizer, step=0):
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, ddp.groups.dp.rank, step)).backward()
    return optimizer.step()


def single():
    return build(SHAPES, CONFIG, groups=megatron_lw.ParallelGroups.single())


def test_wrapping_again_takes_the_model_over():
    ddp, first = single()
    groups = megatron_lw.ParallelGroups.single()
    again = megatron_lw.DistributedDataParallel(ddp.module, groups)
    second = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [again])
    before = again.module.a_weight.detach().clone()
    assert step_once(again, second)[1] > 0
    assert not torch.equal(before, again.module.a_weight)
    with pytest.raises(StateError, match="wrapped again"):
        first.step()


def test_a_second_optimizer_takes_the_model_over():
    ddp, first = single()
    second = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    assert step_once(ddp, second)[1] > 0
    with pytest.raises(StateError, match="another optimizer"):
        first.step()


def _assign(ddp):
    ddp.module.load_state_dict({n: p.clone() for n, p in ddp.state_dict().items()}, assign=True)


def _cast_and_back(ddp):
    ddp.to(torch.float64).to(torch.float32)


def _replace_data(ddp):
    ddp.module.a_weight.data = ddp.module.a_weight.data.clone()


def _replace(ddp):
    ddp.module.a_weight = nn.Parameter(torch.zeros(24, 40))


def _own_grad(ddp):
    ddp.module.a_weight.grad = torch.ones(24, 40)


def _freeze(ddp):
    ddp.module.a_weight.requires_grad_(False)


@pytest.mark.parametrize(
    "change", [_assign, _cast_and_back, _replace_data, _replace, _own_grad, _freeze]
)
def test_a_parameter_changed_under_the_optimizer_is_named(change):
    ddp, optimizer = single()
    step_once(ddp, optimizer)
    optimizer.zero_grad()
    change(ddp)
    with pytest.raises(StateError, match=r"parameter .(a_weight|c_bias)."):
        optimizer.step()


def test_a_parameter_unfrozen_after_construction_is_named():
    model = Bag(SHAPES, torch.float32)
    model.c_bias.requires_grad_(False)
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.single())
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    model.c_bias.requires_grad_(True)
    with pytest.raises(StateError, match="c_bias"):
        optimizer.step()


def test_gradients_from_before_the_optimizer_are_dropped():
    """Class bitwise."""
    results = []
    for early in (True, False):
        model = Bag(SHAPES, torch.float32)
        ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.single())
        if early:
            ddp(integer_grads(SHAPES, 0, 7)).backward()
        optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
        results.append(step_once(ddp, optimizer))
    assert results[0] == results[1]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Bag({"a_weight": (8, 8)}, torch.float32)
        self.outer = Bag({"b_weight": (8, 8)}, torch.float32)

    def forward(self):
        return self.inner.a_weight.sum() * 0 + self.outer.b_weight.sum() * 0


def test_loading_into_a_submodule_refreshes_the_masters():
    """Class bitwise: a zero gradient leaves what was loaded."""
    ddp = megatron_lw.DistributedDataParallel(Nested(), megatron_lw.ParallelGroups.single())
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    ddp.module.inner.load_state_dict({"a_weight": torch.full((8, 8), 5.0)})
    ddp().backward()
    optimizer.step()
    assert torch.equal(ddp.module.inner.a_weight, torch.full((8, 8), 5.0))


def copies():
    ddp, optimizer = build(SHAPES, CONFIG)
    step_once(ddp, optimizer)
    average = torch.optim.swa_utils.AveragedModel(ddp.module)
    average.update_parameters(ddp.module)
    clone = copy.deepcopy(ddp.module)
    pickled = pickle.loads(pickle.dumps(ddp.module))
    with torch.no_grad():
        clone.a_weight.zero_()
        pickled.a_weight.zero_()
    untouched = float(ddp.module.a_weight.detach().abs().sum()) > 0
    refused = []
    for thing in (ddp, optimizer):
        for action in (copy.deepcopy, pickle.dumps):
            try:
                action(thing)
            except StateError as error:
                refused.append(str(error))
    clone(integer_grads(SHAPES, 0, 0)).backward()
    return untouched, len(refused), clone.a_weight.grad is not None, step_once(ddp, optimizer, 1)[0]


def test_copies_of_the_module_are_plain_and_copies_of_the_wrapper_are_refused():
    for untouched, refused, plain_grad, success in run_ranks(copies, 2):
        assert untouched and refused == 4 and plain_grad and success


def dropped():
    """Whether wrapper, buckets and process groups go when the last reference to them does."""
    groups = megatron_lw.ParallelGroups.create()
    ddp, optimizer = build(SHAPES, CONFIG, groups=groups)
    step_once(ddp, optimizer)
    watched = [weakref.ref(ddp), weakref.ref(ddp.buckets[0]), weakref.ref(groups.dp.handle)]
    module = ddp.module
    del ddp, optimizer
    groups.destroy()
    del groups
    gc.collect()
    module(integer_grads(SHAPES, 0, 0)).backward()
    return [ref() is None for ref in watched], module.c_bias.grad is not None


def test_a_dropped_optimizer_leaves_a_plain_module():
    for gone, plain in run_ranks(dropped, 2):
        assert all(gone), gone
        assert plain


def test_a_gradient_that_comes_after_its_bucket_has_left_is_refused_with_the_remedy():
    ddp, _ = single()
    bucket = ddp.buckets[0]
    bucket.begin_reduce()
    with pytest.raises(StateError, match="use_reentrant=False"):
        bucket.add_gradient(bucket.names[0], None)


def test_zero_grad_of_the_wrapper_zeroes():
    ddp, _ = single()
    for _ in range(2):
        ddp.zero_grad()
        ddp(integer_grads(SHAPES, 0, 0)).backward()
    assert torch.equal(ddp.module.c_bias.main_grad, integer_grads(SHAPES, 0, 0)["c_bias"])


def test_backward_that_creates_a_graph():
    ddp, optimizer = single()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="create_graph"):
        ddp(integer_grads(SHAPES, 0, 0)).backward(create_graph=True)
    assert optimizer.step()[0]
    assert not ddp.buckets[0].grads.requires_grad


def test_interrupted_child_leaves_a_broken_optimizer():
    ddp, optimizer = single()
    child = optimizer.runtime.children[-1]

    def interrupted(groups):
        raise KeyboardInterrupt

    child.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        step_once(ddp, optimizer)
    with pytest.raises(StateError, match="broken"):
        optimizer.step()
    with pytest.raises(StateError, match="cannot be published"):
        ddp.start_param_sync()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("lr", float("nan")), ("lr", -1.0), ("scale_mode", "foo"), ("momentum", 1.0), ("nesterov", 1)],
)
def test_a_live_setting_out_of_range_is_refused_before_anything_is_written(setting, value):
    ddp, optimizer = single()
    before = [p.detach().clone() for p in ddp.module.parameters()]
    optimizer.param_groups[-1][setting] = value
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, 0, 0)).backward()
    with pytest.raises(ConfigError, match=setting):
        optimizer.step()
    for a, b in zip(before, ddp.module.parameters(), strict=True):
        assert torch.equal(a, b)


def different_rates():
    ddp, optimizer = build(SHAPES, CONFIG)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + ddp.groups.dp.rank)
    step_once(ddp, optimizer)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rates_that_differ_over_ranks_are_found_by_the_statistics(ranks):
    expect_failure_on_all(different_rates, ranks, PlanMismatchError, "param_groups")


class Unstepped(Bag):
    """Frozen parameters and buffers of odd layouts, registered in another order on each rank."""

    def __init__(self, rank):
        super().__init__(SHAPES, torch.float32)
        for number in [1, 2] if rank == 0 else [2, 1]:
            value = torch.full((3,), float(10 * rank + number))
            frozen = nn.Parameter(value, requires_grad=False)
            self.register_parameter(f"frozen{number}", frozen)
        base = torch.arange(32.0).view(8, 4) + 100 * rank
        self.register_buffer("expanded", torch.full((1, 4), float(rank)).expand(3, 4))
        self.register_buffer("sliced", base[:, :2])
        self.register_buffer("small", torch.full((5,), rank, dtype=torch.int16))
        self.register_buffer("scalar", torch.tensor(float(rank)))
        self.base = base


def unstepped():
    rank = torch.distributed.get_rank()
    model = Unstepped(rank)
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.create())
    megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    outside = model.base[:, 2:] - 100 * rank
    return {n: t.clone() for n, t in model.state_dict().items()}, outside


def test_frozen_parameters_and_buffers_follow_the_first_rank_by_name():
    for state, outside in run_ranks(unstepped, 2):
        assert torch.equal(state["frozen1"], torch.full((3,), 1.0))
        assert torch.equal(state["frozen2"], torch.full((3,), 2.0))
        assert torch.equal(state["expanded"], torch.zeros(3, 4))
        assert torch.equal(state["sliced"], torch.arange(32.0).view(8, 4)[:, :2])
        assert torch.equal(state["small"], torch.zeros(5, dtype=torch.int16))
        assert float(state["scalar"]) == 0.0
        assert torch.equal(outside, torch.arange(32.0).view(8, 4)[:, 2:]), "nothing else is written"


def extra_buffer():
    model = Bag(SHAPES, torch.float32)
    if torch.distributed.get_rank() == 1:
        model.register_buffer("extra", torch.zeros(3))
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.create())
    megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])


def test_a_buffer_on_one_rank_only_is_named_on_all():
    expect_failure_on_all(extra_buffer, 2, PlanMismatchError, "extra")


def wrapped_on_one_rank():
    groups = megatron_lw.ParallelGroups.create()
    model = Bag(SHAPES, torch.float32)
    if groups.world.rank == 0:
        model = megatron_lw.DistributedDataParallel(model, groups)
    config = megatron_lw.OptimizerConfig(**CONFIG)
    megatron_lw.get_megatron_optimizer(config, [model], pg_collection=groups)


def test_a_model_wrapped_on_one_rank_only_raises_on_both():
    expect_failure_on_all(wrapped_on_one_rank, 2, ConfigError, "DistributedDataParallel")


def broken_name_map():
    groups = megatron_lw.ParallelGroups.create()

    def rule(chunk, name):
        return {}[name] if groups.world.rank == 1 else name

    names = megatron_lw.NameMap(rule)
    ddp = megatron_lw.DistributedDataParallel(Bag(SHAPES, torch.float32), groups, names=names)
    megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])


def test_a_name_map_that_fails_on_one_rank_raises_on_both():
    expect_failure_on_all(broken_name_map, 2, ConfigError, "KeyError")


def plan_differs():
    rank = torch.distributed.get_rank()
    override = {"wd_mult": float(rank)}
    build(SHAPES, CONFIG, config_overrides={megatron_lw.ParamKey(name="b_weight"): override})


def test_different_overrides_name_the_parameter():
    expect_failure_on_all(plan_differs, 2, PlanMismatchError, "b_weight")


def test_two_parameters_that_share_storage_are_refused():
    model = Bag(SHAPES, torch.float32)
    model.twin = nn.Parameter(model.a_weight.data.t())
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.single())
    with pytest.raises(ConfigError, match="share storage"):
        megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])


def test_nothing_to_train_is_refused():
    model = nn.Linear(3, 3).requires_grad_(False)
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.single())
    with pytest.raises(ConfigError, match="no trainable parameter"):
        megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(lr=0.1), [ddp])


def padded_vocabulary():
    shapes = {"emb_weight": (8, 4), "b_weight": (40, 24)}
    tags = {"emb_weight": {"embedding": True, "logical_rows": 6}}
    ddp, optimizer = build(shapes, {**CONFIG, "log_num_zeros_in_grad": True}, tags=tags)
    optimizer.zero_grad()
    grads = {n: torch.ones(s) for n, s in shapes.items()}
    grads["emb_weight"][6:] = 0.0
    ddp(grads).backward()
    return optimizer.step()


def test_padding_rows_inside_a_parameter_are_not_counted_as_zeros():
    for success, norm, zeros in run_ranks(padded_vocabulary, 2):
        assert success and zeros == 0
        assert norm == pytest.approx((6 * 4 + 40 * 24) ** 0.5)
