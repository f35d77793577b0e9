"""What callers may pass to `save` and `load`, and what they are told; one process."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import megatron_lw
from megatron_lw.dist_checkpointing import CheckpointWarning, load, save, wait
from megatron_lw.dist_checkpointing.directory import read_manifest
from megatron_lw.errors import CheckpointError, ConfigError

Built = tuple[megatron_lw.DistributedDataParallel, megatron_lw.LayerWiseDistributedOptimizer]


def build(
    shapes: dict[str, tuple[int, ...]] | None = None,
    *,
    frozen: dict[str, tuple[int, ...]] | None = None,
    buffers: dict[str, torch.Tensor] | None = None,
    tags: dict[str, dict[str, Any]] | None = None,
    **config: Any,
) -> Built:
    model = nn.Module()
    for name, shape in {**(shapes or {"a": (4, 6), "b": (5,)}), **(frozen or {})}.items():
        param = nn.Parameter(torch.randn(shape), requires_grad=name not in (frozen or {}))
        megatron_lw.annotate(param, **(tags or {}).get(name, {}))
        model.register_parameter(name, param)
    for name, buffer in (buffers or {}).items():
        model.register_buffer(name, buffer)
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.single())
    settings = megatron_lw.OptimizerConfig(**({"optimizer": "adam", "lr": 0.1} | config))
    return ddp, megatron_lw.get_megatron_optimizer(settings, [ddp])


def step(built: Built) -> None:
    ddp, optimizer = built
    optimizer.zero_grad()
    sum((p**2).sum() for p in ddp.module.parameters() if p.requires_grad).backward()
    optimizer.step()


def messages(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is CheckpointWarning for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"leave_out": "*/exp_avg"}, r"leave_out='\*/exp_avg'; give a list"),
        ({"keep_settings": "lr_mult"}, "keep_settings='lr_mult'; give a list"),
        ({"keep_settings": ["learning_rate"]}, "'learning_rate', which no parameter group has"),
    ],
)
def test_options_that_would_do_something_else_are_refused(tmp_path, options, text):
    """Of one text every letter would be a pattern, and `*` is one that names everything."""
    built = build()
    save(tmp_path, *built, step=0)
    with pytest.raises(ConfigError, match=text):
        load(tmp_path, *built, **options)


def test_a_pattern_that_names_nothing_is_said_aloud(tmp_path):
    built = build()
    save(tmp_path, *built, step=0)
    patterns = ["a/exp_avg", "*weight", "loss_scaler"]
    found = messages(lambda: load(tmp_path, *built, leave_out=patterns))
    assert found == ["leave_out has patterns that name nothing: '*weight'"]


@pytest.mark.parametrize("number", [np.int64(3), torch.tensor(3), 3])
def test_any_integer_is_a_step(tmp_path, number):
    built = build()
    assert save(tmp_path, *built, step=number).name == "step-0000000003"
    loaded = load(tmp_path, *built)
    assert loaded.step == 3 and type(loaded.step) is int


@pytest.mark.parametrize("number", [3.0, "3", None, -1])
def test_anything_else_is_not(tmp_path, number):
    with pytest.raises(ConfigError, match=r"step=.*give"):
        save(tmp_path, *build(), step=number)


def test_a_path_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be made"):
        save(tmp_path / "file", *build(), step=0)


def test_what_was_just_saved_is_kept_also_after_going_back(tmp_path):
    """A run that goes back to step 50 must not lose what it saves at step 60."""
    built = build()
    for number in (50, 90, 100):
        save(tmp_path, *built, step=number)
    found = messages(lambda: save(tmp_path, *built, step=60, keep_last=2))
    assert len(found) == 1 and "step-0000000100 is of a later step than 60" in found[0]
    assert [int(p.name[5:]) for p in sorted(tmp_path.iterdir())] == [60, 90, 100]


def test_settings_that_were_not_saved_and_new_ones_are_named(tmp_path):
    built = build()
    group = built[1].param_groups[0]
    del group["lr_mult"]
    group["foo"] = 3
    save(tmp_path, *built, step=0)
    other = build()
    found = messages(lambda: load(tmp_path, *other))
    assert [text.partition(": ")[2] for text in found] == [
        "settings that were not saved stay as they are: lr_mult",
        "saved settings that it did not have are added: foo",
    ]
    assert other[1].param_groups[0]["foo"] == 3 and other[1].param_groups[0]["lr_mult"] == 1.0
    assert messages(lambda: load(tmp_path, *build(), keep_settings=True)) == []


def test_step_counts_of_a_child_that_was_not_saved_start_anew(tmp_path):
    built = build(optimizer="muon", muon_scalar_optimizer="lion")
    step(built)
    save(tmp_path, *built, step=1)
    other = build()
    step(other)
    found = messages(lambda: load(tmp_path, *other))
    assert any("start from zero: a/momentum, b/exp_avg" in text for text in found)
    [child] = other[1].runtime.children
    assert child.num_steps == 0
    assert all((row == 0).all() for row in child.state_rows(0).values())


def test_a_parameter_without_elements_is_saved_and_loaded(tmp_path):
    shapes = {"a": (4,), "empty": (0,), "none": (3, 0), "scalar": ()}
    built = build(shapes)
    step(built)
    save(tmp_path, *built, step=1)
    record = {(t.name, t.state) for t in read_manifest(tmp_path / "step-0000000001").tensors}
    assert {("empty", "master"), ("none", "exp_avg_sq"), ("scalar", "exp_avg")} <= record
    other = build(shapes)
    load(tmp_path, *other)
    assert torch.equal(other[0].module.a, built[0].module.a)
    with pytest.raises(CheckpointError, match=r"has 'empty/exp_avg', 'empty/exp_avg_sq'"):
        load(tmp_path, *build({k: v for k, v in shapes.items() if k != "empty"}))


@pytest.mark.parametrize("left_out", [False, True])
def test_padding_rows_of_a_frozen_parameter_become_zero(tmp_path, left_out):
    tags = {"table": {"logical_rows": 5, "embedding": True}}
    built = build(frozen={"table": (8, 3)}, tags=tags)
    save(tmp_path, *built, step=0)
    other = build(frozen={"table": (8, 3)}, tags=tags)
    table = other[0].module.table.data.fill_(float("nan"))
    load(tmp_path, *other, leave_out=["table"] if left_out else [])
    assert torch.equal(table[:5], built[0].module.table[:5]) != left_out
    assert bool((table[5:] == 0).all()) != left_out


class Counting(torch.optim.SGD):
    """Has a number among its state, besides its momentum."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1


@pytest.mark.parametrize(
    "left_out, counts", [((), [2, 2]), (("a",), [5, 2]), (("*/count",), [5, 5])]
)
def test_numbers_of_a_whole_optimizer_are_left_out_with_its_tensors(tmp_path, left_out, counts):
    def whole() -> Built:
        return build(
            {"a": (4, 6), "b": (6, 4)},
            optimizer="whole",
            whole_optimizer=f"{__name__}:Counting",
            whole_settings=(("momentum", 0.5),),
        )

    saved, other = whole(), whole()
    for built, steps in ((saved, 2), (other, 5)):
        for _ in range(steps):
            step(built)
    save(tmp_path, *saved, step=2)
    load(tmp_path, *other, leave_out=left_out)
    [child] = other[1].runtime.children
    values = child.owned_values()
    assert [values[name]["count"] for name in ("a", "b")] == counts


def test_frozen_parameters_may_lie_in_memory_as_they_like(tmp_path):
    built = build(frozen={"f": (4, 3, 2, 2)})
    frozen = built[0].module.f
    frozen.data = frozen.data.contiguous(memory_format=torch.channels_last)
    expected = frozen.detach().clone()
    save(tmp_path, *built, step=0)
    frozen.data.fill_(float("nan"))
    load(tmp_path, *built)
    assert torch.equal(frozen, expected) and not frozen.is_contiguous()


BUFFERS = {
    "complex": torch.zeros(3, dtype=torch.complex64) + 1j,
    "empty": torch.zeros(0),
    "scalar": torch.tensor(3.5),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "flag": torch.tensor([True, False]),
}


def test_buffers_of_all_kinds_come_back(tmp_path):
    built = build(buffers={name: buffer.clone() for name, buffer in BUFFERS.items()})
    save(tmp_path, *built, step=0)
    other = build(buffers={name: torch.zeros_like(buffer) for name, buffer in BUFFERS.items()})
    load(tmp_path, *other)
    for name, buffer in BUFFERS.items():
        assert torch.equal(other[0].module.get_buffer(name), buffer), name


def test_an_expanded_buffer_is_refused_before_anything_changes(tmp_path):
    built = build(buffers={"one": torch.ones(1).expand(4)})
    save(tmp_path, *built, step=0)
    with pytest.raises(CheckpointError, match=r"one/value is an expanded tensor.*clone"):
        load(tmp_path, *built)
    step(built)  # not broken


def test_staging_for_the_background_follows_what_is_saved(tmp_path):
    """A tensor that is gone frees its memory; one of another dtype is not cast."""
    built = build(frozen={"f": (3,)})
    for number in range(3):
        extra = {"state": torch.randn(10)}
        save(tmp_path, *built, extra=extra, step=number, background=True)
    wait(built[1])
    count = len(built[1].saver._buffers)
    built[0].module.f.data = built[0].module.f.data.double()
    directory = save(tmp_path, *built, step=3, background=True)
    wait(built[1])
    assert len(built[1].saver._buffers) == count - 1
    assert {t.dtype for t in read_manifest(directory).tensors if t.name == "f"} == {"float64"}


def test_random_states_of_all_kinds_come_back(tmp_path):
    built = build()
    generators = {
        kind: np.random.Generator(kind(3)) for kind in (np.random.PCG64, np.random.MT19937)
    }
    extra = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        **{kind.__name__: g.bit_generator.state for kind, g in generators.items()},
    }
    before = copy.deepcopy(extra)
    save(tmp_path, *built, extra=extra, step=0)

    def draw() -> list[Any]:
        drawn = [float(g.random()) for g in generators.values()]
        return [random.random(), float(np.random.rand()), float(torch.rand(())), *drawn]

    first = draw()
    assert draw() != first
    loaded = load(tmp_path, *built).extra
    assert repr(extra) == repr(before)
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])
    for kind, generator in generators.items():
        generator.bit_generator.state = loaded[kind.__name__]
    assert draw() == first


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=50, cycle_momentum=False),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_torch_schedulers_go_on_as_if_nothing_had_been(tmp_path, name):
    def advance(scheduler: Any, optimizer: Any) -> list[float]:
        rates = []
        for _ in range(4):
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    built, other = build(), build(lr=0.7)
    scheduler, another = SCHEDULERS[name](built[1]), SCHEDULERS[name](other[1])
    advance(scheduler, built[1])
    state = copy.deepcopy(scheduler.state_dict())
    save(tmp_path, *built, scheduler, step=4)
    assert repr(scheduler.state_dict()) == repr(state)
    load(tmp_path, *other, another)
    assert advance(another, other[1]) == advance(scheduler, built[1])


class ParamScheduler:
    """As Megatron's: it counts steps, and sets the groups when it is given its state."""

    def __init__(self, optimizer: Any, max_lr: float) -> None:
        self.optimizer, self.max_lr, self.num_steps = optimizer, max_lr, 0
        self.step(0)

    def step(self, increment: int = 1) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("max_lr", self.max_lr) * 0.5**self.num_steps

    def state_dict(self) -> dict[str, Any]:
        return {"max_lr": self.max_lr, "num_steps": self.num_steps, "wsd_decay_steps": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.max_lr, self.num_steps = state["max_lr"], 0
        self.step(state["num_steps"])


@pytest.mark.parametrize("keep, lr", [(False, 0.05), (["max_lr"], 0.35), (True, 0.35)])
def test_a_scheduler_that_sets_settings_has_the_last_word(tmp_path, keep, lr):
    built, other = build(), build(lr=0.7)
    scheduler, another = ParamScheduler(built[1], 0.1), ParamScheduler(other[1], 0.7)
    scheduler.step()
    save(tmp_path, *built, scheduler, step=1)
    load(tmp_path, *other, another, keep_settings=keep)
    assert other[1].param_groups[0]["lr"] == pytest.approx(lr)


def test_damage_in_extra_is_found_before_anything_changes(tmp_path):
    built = build({"a": (64,)})
    directory = save(tmp_path, *built, extra={"z": torch.arange(1 << 10)}, step=0)
    [path] = directory.glob("rank*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="chunk 0"):
        load(tmp_path, *built)
    step(built)  # not broken
