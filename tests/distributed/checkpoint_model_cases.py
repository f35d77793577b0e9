"""Models whose names, copies, chunks or children differ between save and load, on one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw.dist_checkpointing import CheckpointWarning, load, save
from megatron_lw.optimizer.held import held_buckets
from tests.distributed.cases import Bag, integer_grads
from tests.distributed.checkpoint_fault_cases import text_of

Chunk = dict[str, tuple[int, ...]]
Made = tuple[list[megatron_lw.DistributedDataParallel], megatron_lw.LayerWiseDistributedOptimizer]


def make(
    chunks: list[Chunk],
    tags: dict[str, dict[str, Any]] | None = None,
    *,
    frozen: tuple[str, ...] = (),
    groups: megatron_lw.ParallelGroups | None = None,
    bucket_size: int = 100,
    **config: Any,
) -> Made:
    """Wrapped chunks of parameters whose local names are global, behind `c<chunk>_` prefixes."""
    groups = groups or megatron_lw.ParallelGroups.create()
    wrapped = []
    for shapes in chunks:
        model = Bag({}, torch.float32)
        for name, shape in shapes.items():
            param = nn.Parameter(torch.full(shape, -7.0), requires_grad=name not in frozen)
            megatron_lw.annotate(param, **(tags or {}).get(name, {}))
            model.register_parameter(name, param)
        wrapped.append(
            megatron_lw.DistributedDataParallel(
                model, groups, megatron_lw.DDPConfig(bucket_size=bucket_size)
            )
        )
    settings = megatron_lw.OptimizerConfig(**({"optimizer": "adam", "lr": 0.1} | config))
    return wrapped, megatron_lw.get_megatron_optimizer(settings, wrapped, pg_collection=groups)


def index(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Value = element index, apart for each parameter."""
    return torch.arange(torch.Size(shape).numel()).float().view(shape) + 1000 * number


def states(made: Made) -> list[tuple[str, str, slice, torch.Tensor]]:
    """Parameter, state, elements and view, of everything that lies in this rank's rows."""
    found = []
    for held in held_buckets(made[1].runtime):
        for key, row in held.rows.items():
            for name, slot in held.bucket.row_slots():
                run = slice(slot.param_start, slot.param_start + slot.numel)
                found.append((name, key, run, row[slot.row_start :][: slot.numel]))
    return found


def fill(made: Made, numbers: dict[str, int]) -> None:
    """Set masters, states and frozen parameters to their indices."""
    shapes = {n: p.shape for chunk in made[0] for n, p in chunk.module.named_parameters()}
    for name, key, run, view in states(made):
        view.copy_(index(shapes[name], numbers[name]).view(-1)[run] + len(key) / 64)
    for chunk in made[0]:
        for name, param in chunk.module.named_parameters():
            if not param.requires_grad:
                param.data.copy_(index(param.shape, numbers[name]))


def wrong(made: Made, numbers: dict[str, int]) -> list[str]:
    """What is not as `fill` makes it."""
    found = []
    params = {n: p for chunk in made[0] for n, p in chunk.module.named_parameters()}
    for name, key, run, view in states(made):
        expected = index(params[name].shape, numbers[name]).view(-1)[run] + len(key) / 64
        if not torch.equal(view, expected):
            found.append(f"{name}/{key}")
    for name, param in params.items():
        shift = len("master") / 64 if param.requires_grad else 0.0
        if not torch.equal(param.data, index(param.shape, numbers[name]) + shift):
            found.append(name)
    return found


def quietly(call: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return call()


TIED = {"embedding": (6, 5), "output": (6, 5)}
WORDS = {
    "embedding": {"tied": "words", "embedding": True},
    "output": {"tied": "words", "embedding": True},
}


def stages(tied: bool) -> Made:
    """Two stages: the embedding on one, the output layer on the other."""
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    name = ("embedding", "output")[groups.pp.rank]
    tags = WORDS if tied else {n: {n: True} for n in TIED}
    shapes = {name: TIED[name], ("a", "b")[groups.pp.rank]: (4,)}
    return make([shapes], tags, groups=groups)


def save_tied(root: Path, tied: bool) -> None:
    made = stages(tied)
    numbers = {"embedding": 1, "output": 1 if tied else 2, "a": 3, "b": 4}
    fill(made, numbers)
    save(root, made[0], made[1], step=1)


def save_untied_on_one(root: Path) -> None:
    """One stage uses the embedding twice, and has no output layer of its own."""
    made = make([{"embedding": (6, 5), "a": (4,), "b": (4,)}], {"embedding": {"embedding": True}})
    fill(made, {"embedding": 1, "a": 3, "b": 4})
    save(root, made[0], made[1], step=1)


def load_tied(root: Path, tied: bool, leave_out: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    made = stages(tied)
    numbers = {"embedding": 1, "output": 1, "a": 3, "b": 4}
    text = text_of(lambda: load(root, made[0], made[1], leave_out=leave_out))
    if not text:
        made[1].check(collectives=True)
    return text, wrong(made, numbers)


def load_on_one(root: Path) -> tuple[str, list[str]]:
    made = make([{"embedding": (6, 5), "a": (4,), "b": (4,)}], {"embedding": {"embedding": True}})
    text = text_of(lambda: load(root, made[0], made[1]))
    return text, wrong(made, {"embedding": 1, "a": 3, "b": 4})


LAYERS = {f"layers.{i}.{name}": shape for i in range(4) for name, shape in
          {"w": (6, 4), "b": (7,)}.items()}  # fmt: skip


def interleaved(pipeline: int, chunks: int, equal: bool = True) -> Made:
    """Four layers on stages with several chunks each, whose local names all start at layer 0."""
    groups = megatron_lw.ParallelGroups.create(pipeline=pipeline)
    wrapped = []
    per_chunk = 4 // (pipeline * chunks)
    for chunk in range(chunks):
        first = (chunk * pipeline + groups.pp.rank) * per_chunk
        layers = nn.ModuleList(
            Bag({"w": (6, 4), "b": (7,)}, torch.float32) for _ in range(per_chunk)
        )
        model = nn.Module()
        model.layers = layers
        model.register_buffer("calls", torch.full((3,), 5 if equal else 5 + chunk))
        names = megatron_lw.NameMap.with_layer_offsets(
            "layers", {index: (index * pipeline + groups.pp.rank) * per_chunk
                       for index in range(chunks)}
        )  # fmt: skip
        assert names.to_global(chunk, "layers.0.w") == f"layers.{first}.w"
        wrapped.append(
            megatron_lw.DistributedDataParallel(
                model, groups, megatron_lw.DDPConfig(bucket_size=30), names=names
            )
        )
    settings = megatron_lw.OptimizerConfig(optimizer="muon", lr=0.1)
    return wrapped, megatron_lw.get_megatron_optimizer(settings, wrapped, pg_collection=groups)


def layers_of(made: Made) -> list[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Parameter, state, view and expected values of the rows."""
    return [
        (name, key, view, index(LAYERS[name], list(LAYERS).index(name)).view(-1)[run] + len(key))
        for name, key, run, view in states(made)
    ]


def save_chunks(root: Path, pipeline: int, chunks: int) -> None:
    made = interleaved(pipeline, chunks)
    for _, _, view, expected in layers_of(made):
        view.copy_(expected)
    save(root, made[0], made[1], step=1)


def load_chunks(root: Path, pipeline: int, chunks: int) -> tuple[list[str], int, list[Any]]:
    made = interleaved(pipeline, chunks)
    for chunk in made[0]:
        chunk.module.calls.zero_()
    load(root, made[0], made[1])
    made[1].check(collectives=True)
    found = layers_of(made)
    bad = [f"{name}/{key}" for name, key, view, want in found if not torch.equal(view, want)]
    for number, chunk in enumerate(made[0]):
        for name, param in chunk.named_global_parameters(number):
            want = index(LAYERS[name], list(LAYERS).index(name)) + len("master")
            if not torch.equal(param.data, want):
                bad.append(name)
    return bad, len(found), [chunk.module.calls.tolist() for chunk in made[0]]


def chunks_that_differ(root: Path) -> str:
    made = interleaved(1, 2, equal=False)
    return text_of(lambda: save(root, made[0], made[1], step=1))


FREEZING = {"a": (5, 4), "b": (7,), "c": (6,)}
NUMBERS = {"a": 0, "b": 1, "c": 2}


def freeze(root: Path, saved: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, str, list[str]]:
    """Save with some parameters frozen, load with others; a stage may have nothing to train."""
    made, other = make([FREEZING], frozen=saved), make([FREEZING], frozen=now)
    fill(made, NUMBERS)
    save(root, made[0], made[1], step=1)
    strict = text_of(lambda: load(root, other[0], other[1]))
    changed = sorted(set(saved) ^ set(now))
    patterns = [f"{name}/exp_avg*" for name in changed]
    text = quietly(lambda: text_of(lambda: load(root, other[0], other[1], leave_out=patterns)))
    bad = []
    for _, param in other[0][0].module.named_parameters():
        bad += [] if param.data.min() >= 0 else ["not loaded"]
    other[1].check(collectives=True)
    return strict, text, bad


def masterless(root: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Weights after trained -> frozen and after frozen -> trained."""
    found = []
    for saved, now in (((), ("a",)), (("a",), ())):
        made, other = make([FREEZING], frozen=saved), make([FREEZING], frozen=now)
        fill(made, NUMBERS)
        path = root / f"{len(now)}"
        save(path, made[0], made[1], step=1)
        quietly(lambda: load(path, other[0], other[1], leave_out=["a/exp_avg*"]))  # noqa: B023
        found.append({n: float(p.data.max()) for n, p in other[0][0].module.named_parameters()})
    return found[0], found[1]


def frozen_stage(root: Path) -> tuple[list[str], int, bool]:
    """Two stages, nothing to train on the first; loaded by one stage."""
    groups = megatron_lw.ParallelGroups.create(pipeline=2)
    names = (("a",), ("b", "c"))[groups.pp.rank]
    shapes = {name: FREEZING[name] for name in names}
    made = make([shapes], groups=groups, frozen=("a",))
    fill(made, NUMBERS)
    save(root, made[0], made[1], step=1)
    other = make([shapes], groups=groups, frozen=("a",))
    load(root, other[0], other[1])
    other[1].check(collectives=True)
    one = make([FREEZING], frozen=("a",))
    load(root, one[0], one[1])
    bad = wrong(other, NUMBERS) + wrong(one, NUMBERS)
    one[1].zero_grad()
    one[0][0](integer_grads(FREEZING, 0, 0)).backward()
    return bad, len(made[1].runtime.buckets), one[1].step()[0]


CHILDREN: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
    "normuon": {"optimizer": "normuon"},
    "adamuon": {"optimizer": "adamuon"},
    **{
        name: {
            "optimizer": "whole",
            "whole_optimizer": f"torch.optim:{name}",
            "whole_settings": tuple(settings.items()),
        }
        for name, settings in {
            "Adagrad": {"initial_accumulator_value": 0.5},
            "NAdam": {"betas": (0.8, 0.99)},
            "RMSprop": {"momentum": 0.9, "centered": True},
            "SGD": {},
            "Adafactor": {},
            "Muon": {},
        }.items()
    },
}
OWNED = {"a": (24, 40), "b": (40, 24), "c": (6, 5), "d": (37,), "e": (16, 3, 2, 2), "f": (72, 40)}
STACK = {"g": {"matrices": 4}}


def trained(made: Made, first: int, stop: int) -> None:
    shapes = {**OWNED, "g": (4, 8, 12)}
    for step in range(first, stop):
        made[1].zero_grad()
        grads = integer_grads(shapes, 0, step)  # the mean over any number of ranks
        made[0][0](grads).backward()
        made[1].step()


def owned(made: Made) -> dict[str, torch.Tensor]:
    """Every box of an owned state, by parameter, key and place."""
    return {
        f"{state.param}/{state.key}{list(state.start)}": state.tensor.clone()
        for child in made[1].runtime.children
        for state in child.owned_states()
    }


def child_runs(root: Path, child: str, again: bool) -> tuple[Any, ...]:
    """Two steps, a save or a load, two steps; weights, owned boxes after the load, results."""
    made = make([{**OWNED, "g": (4, 8, 12)}], STACK, bucket_size=1500, **CHILDREN[child])
    path = root / child
    if again:
        load(path, made[0], made[1])
    else:
        for chunk in made[0]:
            for name, param in chunk.module.named_parameters():
                param.data.copy_(index(param.shape, 0) / 64 + len(name))
        made[1].reload_model_params()
        trained(made, 0, 2)
        save(path, made[0], made[1], step=2)
    boxes = owned(made)
    steps = {c.name: c.num_steps for c in made[1].runtime.children}
    trained(made, 2, 4)
    made[1].check(collectives=True)
    weights = {n: p.detach().clone() for n, p in made[0][0].module.named_parameters()}
    return weights, boxes, steps


def every_child(root: Path, again: bool) -> dict[str, tuple[Any, ...]]:
    return {child: child_runs(root, child, again) for child in CHILDREN}


def empty_ranks(root: Path) -> tuple[list[str], int]:
    """One parameter of two elements, as on any number of ranks."""
    made = make([{"a": (2,)}])
    path = root / f"{made[1].groups.world.size}"
    fill(made, {"a": 1})
    save(path, made[0], made[1], step=1)
    bad = []
    for saved in sorted(root.iterdir()):
        other = make([{"a": (2,)}])
        load(saved, other[0], other[1])
        bad += wrong(other, {"a": 1})
    return bad, len(states(made))
