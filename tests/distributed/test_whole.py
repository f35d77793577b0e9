"""Optimizers of torch's kind on whole matrices at their owners, against themselves on one process.

Class *bitwise* where gradients are integers: an owner hands over exactly what one process would.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw import dist_checkpointing
from megatron_lw.errors import ConfigError, StateError
from megatron_lw.optimizer.children.whole import WholeChild
from tests.distributed.cases import build, initial_values, integer_grads, mean_grads
from tests.harness import run_ranks

SHAPES = {
    "a_weight": (24, 40), "b_weight": (40, 24), "c_weight": (6, 5), "d_bias": (37,),
    "e_weight": (16, 3, 2, 2), "f_weight": (72, 40),
}  # fmt: skip
STACK = {"g_experts": (4, 8, 12)}
CONFIG: dict[str, Any] = {"optimizer": "whole", "lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.0}
CHOICES: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "adagrad": ("torch.optim:Adagrad", (("initial_accumulator_value", 0.5),)),
    "adamax": ("torch.optim:Adamax", ()),
    "nadam": ("torch.optim:NAdam", (("betas", (0.8, 0.99)),)),
    "adadelta": ("torch.optim:Adadelta", ()),
    "rmsprop": ("torch.optim:RMSprop", (("momentum", 0.9), ("centered", True))),
    "sgd": ("torch.optim:SGD", (("momentum", 0.9), ("dampening", 0.5))),
    "adafactor": ("torch.optim:Adafactor", ()),
    "muon": ("torch.optim:Muon", ()),
}
STEPS = 3


def config_of(choice: str) -> dict[str, Any]:
    path, settings = CHOICES[choice]
    return {**CONFIG, "whole_optimizer": path, "whole_settings": settings}


def matrix_shape(shape):
    return (shape[0], torch.Size(shape[1:]).numel())


def on_one_process(choice: str, ranks: int, steps: int = STEPS, shapes=SHAPES):
    """Each matrix under torch's optimizer, with the mean gradients."""
    path, settings = CHOICES[choice]
    make = vars(torch.optim)[path.partition(":")[2]]
    values = {n: v for n, v in initial_values(shapes).items() if v.dim() > 1}
    params = {n: torch.nn.Parameter(v.reshape(matrix_shape(v.shape))) for n, v in values.items()}
    optimizer = make(list(params.values()), lr=0.05, weight_decay=0.1, **dict(settings))
    for step in range(steps):
        grads = mean_grads("integer", shapes, ranks, step)
        for name, param in params.items():
            param.grad = grads[name].reshape(param.shape)
        optimizer.step()
    return {name: param.detach().view(shapes[name]) for name, param in params.items()}


def trained(optimizer, ddp, shapes, first, stop):
    for step in range(first, stop):
        optimizer.zero_grad()
        ddp(integer_grads(shapes, ddp.groups.dp.rank, step)).backward()
        optimizer.step()
    optimizer.check(collectives=True)
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


def every_choice():
    found = {}
    for choice in CHOICES:
        ddp, optimizer = build(SHAPES, config_of(choice), bucket_size=1500)
        weights = trained(optimizer, ddp, SHAPES, 0, STEPS)
        [child] = [c for c in optimizer.runtime.children if isinstance(c, WholeChild)]
        keys = {(s.param, s.key) for s in child.owned_states()}
        found[choice] = weights, child.num_stepped, keys, child.num_buckets
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torchs_optimizers_give_the_bits_of_one_process(ranks):
    """Class bitwise: cut matrices, several buckets, a convolution as a matrix."""
    runs = run_ranks(every_choice, ranks)
    for choice in CHOICES:
        expected = on_one_process(choice, ranks)
        for run in runs:
            weights, _, _, buckets = run[choice]
            assert buckets > 1
            for name, want in expected.items():
                assert torch.equal(weights[name], want), (choice, name)
            assert not torch.equal(weights["d_bias"], initial_values(SHAPES)["d_bias"])
        assert sum(run[choice][1] for run in runs) == len(expected)
        owned = [key for run in runs for key in run[choice][2]]
        assert len(owned) == len(set(owned))


EQUAL = {
    **{f"a{i}_weight": (64, 64) for i in range(3)},
    **{f"b{i}_weight": (8, 512) for i in range(9)},
}


def bytes_held():
    ddp, optimizer = build(EQUAL, config_of("nadam"), bucket_size=20_000)
    optimizer.zero_grad()
    ddp(integer_grads(EQUAL, ddp.groups.dp.rank, 0)).backward()
    optimizer.step()
    [child] = [c for c in optimizer.runtime.children if isinstance(c, WholeChild)]
    rows = sum(publisher.master.row.nbytes for publisher in ddp.publishers)
    return rows + sum(state.tensor.nbytes for state in child.owned_states())


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_rank_holds_is_an_even_share(ranks):
    """Exact, measured from tensors: masters in rows, moments at owners, at most 1.02 of a share."""
    held = run_ranks(bytes_held, ranks)
    assert sum(held) >= 12 * 4096 * 12
    assert max(held) <= 1.02 * sum(held) / ranks


def divided(tensor: int):
    groups = megatron_lw.ParallelGroups.create(tensor=tensor)
    local = {
        name: (shape[0] // tensor, *shape[1:]) if name in ("a_weight", "f_weight") else shape
        for name, shape in SHAPES.items()
    }
    tags = {name: {"tp_dim": 0} for name in ("a_weight", "f_weight")}
    ddp, optimizer = build(local, config_of("nadam"), bucket_size=700, tags=tags, groups=groups)
    rank = groups.tp.rank
    with torch.no_grad():
        for name, value in initial_values(SHAPES).items():
            rows = local[name][0]
            part = value if local[name] == SHAPES[name] else value[rank * rows : (rank + 1) * rows]
            ddp.module.get_parameter(name).copy_(part)
    optimizer.reload_model_params()
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = integer_grads(SHAPES, groups.dp.rank, step)
        for name in tags:
            rows = local[name][0]
            grads[name] = grads[name][rank * rows : (rank + 1) * rows]
        ddp(grads).backward()
        optimizer.step()
    optimizer.check(collectives=True)
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2)])
def test_shards_of_tensor_parallelism_are_stepped_as_one_matrix(ranks, tensor):
    """Class bitwise: divided matrices whole at the owner, replicated ones equal everywhere."""
    runs = run_ranks(divided, ranks, tensor)
    expected = on_one_process("nadam", ranks // tensor)
    for rank, run in enumerate(runs):
        for name, want in expected.items():
            part = run[name]
            rows = part.shape[0]
            start = (rank % tensor) * rows if rows < want.shape[0] else 0
            assert torch.equal(part, want[start : start + rows]), name


def failing():
    ddp, optimizer = build(SHAPES, config_of("nadam"), bucket_size=1500)
    [child] = [c for c in optimizer.runtime.children if isinstance(c, WholeChild)]
    owned = [matrix.param for bucket in child._buckets for matrix in bucket.owned]
    before = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    if ddp.groups.dp.rank == 1:
        optimizer_of = child._buckets[-1].owned or child._buckets[0].owned

        def fail(closure=None):
            raise MemoryError("injected")

        optimizer_of[0].state.optimizer.step = fail
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, ddp.groups.dp.rank, 0)).backward()
    try:
        optimizer.step()
    except StateError as error:
        same = all(torch.equal(p.detach(), before[n]) for n, p in ddp.module.named_parameters())
        return len(owned), str(error), same
    return len(owned), "", False


def test_an_optimizer_that_fails_on_one_rank_stops_all():
    """Class bitwise for the weights: nothing is published, every rank names bucket and rank."""
    for owned, message, same in run_ranks(failing, 2):
        assert owned > 0 and same
        assert "stage 'whole'" in message and "MemoryError: injected" in message


def save(child: WholeChild, into: dict[str, Any]) -> None:
    """What a checkpoint does: boxes by name, values by parameter."""
    into["num_steps"] = child.num_steps
    for state in child.owned_states():
        into.setdefault("boxes", []).append(
            (state.param, state.key, state.global_shape, state.start, state.tensor.clone())
        )
    into["values"] = {n: dict(v) for n, v in child.owned_values().items()}


def load(child: WholeChild, saved: list[dict[str, Any]], values_first: bool) -> None:
    """Fill this rank's boxes from those of all ranks."""
    values = {}
    for part in saved:
        for name, of_param in part["values"].items():
            values.setdefault(name, {}).update(of_param)
    whole = {}
    for part in saved:
        for param, key, shape, start, tensor in part.get("boxes", ()):
            full = whole.setdefault((param, key), torch.full(shape, torch.nan, dtype=tensor.dtype))
            full[tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))] = tensor
    assert not any(full.isnan().any() for full in whole.values())
    if values_first:
        child.load_owned_values(values)
        child.num_steps = saved[0]["num_steps"]
    for state in child.owned_states():
        full = whole[state.param, state.key]
        assert tuple(full.shape) == state.global_shape
        box = tuple(slice(a, a + n) for a, n in zip(state.start, state.tensor.shape, strict=True))
        state.tensor.copy_(full[box])
    child.load_owned_values(values)
    child.num_steps = saved[0]["num_steps"]


ALL = {**SHAPES, **STACK}


def first_half(choice):
    ddp, optimizer = build(ALL, config_of(choice), bucket_size=1500,
                           tags={"g_experts": {"matrices": 4}})  # fmt: skip
    [child] = [c for c in optimizer.runtime.children if isinstance(c, WholeChild)]
    save(child, {})  # before the first step: changes nothing
    trained(optimizer, ddp, ALL, 0, 2)
    saved: dict[str, Any] = {}
    save(child, saved)
    saved["weights"] = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    return saved, trained(optimizer, ddp, ALL, 2, 4)


def second_half(choice, saved, used_before, values_first):
    ddp, optimizer = build(ALL, config_of(choice), bucket_size=1500,
                           tags={"g_experts": {"matrices": 4}})  # fmt: skip
    [child] = [c for c in optimizer.runtime.children if isinstance(c, WholeChild)]
    if used_before:
        trained(optimizer, ddp, ALL, 7, 9)
    load(child, saved, values_first)
    with torch.no_grad():
        for name, weight in saved[0]["weights"].items():
            ddp.module.get_parameter(name).copy_(weight)
    optimizer.reload_model_params()
    for step in range(2, 4):
        optimizer.zero_grad()
        grads = mean_grads("integer", ALL, 2, step)
        ddp(grads).backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("choice", ["nadam", "sgd", "adagrad", "adafactor"])
@pytest.mark.parametrize("used_before", [False, True], ids=["new", "used"])
def test_state_goes_to_other_owners(choice, used_before):
    """Class bitwise: saved on 2 ranks, loaded on 1 and 3, into a new or a used optimizer."""
    halves = run_ranks(first_half, 2, choice)
    saved = [half[0] for half in halves]
    for ranks in (1, 3):
        for run in run_ranks(second_half, ranks, choice, saved, used_before, ranks == 3):
            for name, want in halves[0][1].items():
                if len(ALL[name]) > 1:
                    assert torch.equal(run[name], want), name


def written(folder):
    ddp, optimizer = build(ALL, config_of("nadam"), bucket_size=1500,
                           tags={"g_experts": {"matrices": 4}})  # fmt: skip
    trained(optimizer, ddp, ALL, 0, 2)
    dist_checkpointing.save(folder, ddp, optimizer, step=2)
    return trained(optimizer, ddp, ALL, 2, 4)


def read(folder):
    ddp, optimizer = build(ALL, config_of("nadam"), bucket_size=900, seed=3,
                           tags={"g_experts": {"matrices": 4}})  # fmt: skip
    dist_checkpointing.load(folder, ddp, optimizer)
    for step in range(2, 4):
        optimizer.zero_grad()
        ddp(mean_grads("integer", ALL, 2, step)).backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_holds_what_owners_hold(ranks, tmp_path):
    """Class bitwise: saved by 2 ranks, read by others, for the matrices and for Adam's vector."""
    whole = run_ranks(written, 2, str(tmp_path / "run"))[0]
    for run in run_ranks(read, ranks, str(tmp_path / "run")):
        for name, want in whole.items():
            assert torch.equal(run[name], want), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whole_optimizer": None}, "needs whole_optimizer, which is None"),
        ({"whole_optimizer": "torch.optim:Nothing"}, "'torch.optim:Nothing' is not found"),
        ({"whole_optimizer": "nowhere.at_all:X"}, "'nowhere.at_all:X' is not found"),
        ({"whole_optimizer": "torch:zeros"}, "'torch:zeros' is .*not a class of optimizers"),
        ({"whole_optimizer": "torch.optim:LBFGS"}, "LBFGS' needs a closure"),
        ({"whole_optimizer": "torch.optim:Rprop"}, "knows no weight decay.*set it to 0"),
        (
            {"whole_optimizer": "torch.optim:Adagrad", "whole_settings": (("etas", 1),)},
            "etas.* are not what torch.optim:Adagrad takes",
        ),
        ({"whole_settings": [("a", 1)]}, "whole_settings=.*tuple of pairs"),
        ({"whole_optimizer": ""}, "whole_optimizer='' is not a path"),
    ],
)
def test_what_cannot_step_is_refused_with_a_remedy(settings, message):
    """At construction, on every rank."""
    with pytest.raises(ConfigError, match=message):
        build(SHAPES, {**CONFIG, "whole_optimizer": "torch.optim:Adagrad", **settings},
              groups=megatron_lw.ParallelGroups.single())  # fmt: skip
