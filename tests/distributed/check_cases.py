"""What can go wrong between two steps, done to one rank, for the tests of `optimizer.check()`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import megatron_lw
from megatron_lw.distributed import collectives
from megatron_lw.distributed.buffers import GradState
from megatron_lw.distributed.calls import same_calls
from megatron_lw.distributed.handle import Handle
from megatron_lw.errors import InvariantError
from megatron_lw.optimizer.check import check_optimizer
from megatron_lw.optimizer.held import held_buckets
from tests.distributed.cases import Bag, build, initial_values, integer_grads
from tests.distributed.parallel_cases import Spec, mine, part_of

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (100,), "d_scale": (70,)}
CONFIG = {"optimizer": "muon", "lr": 0.05, "bf16": True}
MIXED = {
    "a_weight": torch.bfloat16,
    "b_weight": torch.bfloat16,
    "c_bias": torch.bfloat16,
    "d_scale": torch.float32,
}

Built = tuple[megatron_lw.DistributedDataParallel, megatron_lw.LayerWiseDistributedOptimizer]


def trained(**options: Any) -> Built:
    ddp, optimizer = build(SHAPES, CONFIG, dtype=MIXED, **options)
    backward(ddp, optimizer, 0)
    optimizer.step()
    return ddp, optimizer


def backward(ddp: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, ddp.groups.dp.rank, step)).backward()


def found(optimizer: Any, **options: Any) -> str:
    """What `check` raises; empty if it finds nothing."""
    try:
        check_optimizer(optimizer, **options)
    except InvariantError as error:
        return str(error)
    return ""


@contextmanager
def patched(target: Any, name: str, value: Any):
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


@contextmanager
def written(tensor: torch.Tensor, index: int, value: float):
    """Change one element by hand, and change it back."""
    flat = tensor.detach().view(-1)
    before = flat[index].clone()
    flat[index] = value
    try:
        yield
    finally:
        flat[index] = before


@contextmanager
def entered(mapping: Any, key: Any, value: Any):
    before = mapping[key]
    mapping[key] = value
    try:
        yield
    finally:
        mapping[key] = before


def bucket_of(optimizer: Any, name: str) -> Any:
    return next(b for b in optimizer.runtime.buckets if name in b.names)


def publisher_of(optimizer: Any, name: str) -> Any:
    return next(p for p in optimizer.runtime.publishers if name in p.bucket.names)


def foreign(optimizer: Any, name: str) -> int:
    """An element of a parameter that lies in another rank's row."""
    bucket = bucket_of(optimizer, name)
    mine = [slot for found, slot in bucket.row_slots() if found == name]
    taken = {i for slot in mine for i in range(slot.param_start, slot.param_start + slot.numel)}
    return next(i for i in range(bucket.params[name].numel()) if i not in taken)


def first_in_row(optimizer: Any, name: str) -> int:
    """Place in this rank's row of its first element of a parameter that lies in it."""
    return next(
        slot.row_start for found, slot in bucket_of(optimizer, name).row_slots() if found == name
    )


def change_plan(ddp: Any, optimizer: Any) -> Any:
    plan = optimizer.runtime.plans["dense"]
    params = [
        dataclasses.replace(p, group="elsewhere") if i == 1 else p
        for i, p in enumerate(plan.params)
    ]
    other = dataclasses.replace(plan, params=tuple(params))
    return entered(optimizer.runtime.plans, "dense", other)


def move_parameter(ddp: Any, optimizer: Any) -> Any:
    return patched(ddp.module.a_weight, "data", ddp.module.a_weight.detach().clone())


def unfreeze(ddp: Any, optimizer: Any) -> Any:
    extra = torch.nn.Parameter(torch.zeros(3))

    @contextmanager
    def added():
        ddp.module.register_parameter("extra", extra)
        try:
            yield
        finally:
            del ddp.module.extra

    return added()


def forget_gradient(ddp: Any, optimizer: Any) -> Any:
    weight = ddp.module.b_weight
    return patched(weight, "grad", torch.zeros_like(weight))


def child_of(optimizer: Any, name: str) -> Any:
    return next(child for child in optimizer.runtime.children if child.name == name)


def fail_inside(ddp: Any, optimizer: Any) -> Any:
    def explode(bucket: int) -> dict[str, torch.Tensor]:
        raise MemoryError("no memory")

    return patched(child_of(optimizer, "adam"), "state_rows", explode)


Fault = tuple[Callable[[Any, Any], Any], tuple[str, ...]]
"""What is done on rank 1 of 3, and what the message must say on every rank."""

FAULTS: dict[str, Fault] = {
    "plan": (change_plan, ("plan: parameter 'b_weight'", "rank 1", "elsewhere")),
    "lr": (
        lambda ddp, opt: entered(opt.param_groups[0], "lr", 0.25),
        ("settings: lr of parameter group", "0.05 on ranks 0, 2", "0.25 on rank 1"),
    ),
    "copy in another row": (
        lambda ddp, opt: written(ddp.module.a_weight, foreign(opt, "a_weight"), 7.5),
        ("replicas: parameter 'a_weight'", "'dp'", "7.5 on rank 1", "first at element 320:"),
    ),
    "copy of another dtype in the bucket": (
        lambda ddp, opt: written(ddp.module.d_scale, foreign(opt, "d_scale"), 0.125),
        ("replicas: parameter 'd_scale'", "0.125 on rank 1"),
    ),
    "master": (
        lambda ddp, opt: written(
            publisher_of(opt, "b_weight").master.row, first_in_row(opt, "b_weight"), 3.0
        ),
        (
            "published weights: parameter 'b_weight', element",
            "its master 3.0",
            "bfloat16",
            "rank 1",
        ),
    ),
    "master of a mixed bucket": (
        lambda ddp, opt: written(publisher_of(opt, "d_scale").master.row, 0, 3.0),
        ("published weights: parameter", "its master 3.0", "[rank 1]"),
    ),
    "step count": (
        lambda ddp, opt: patched(child_of(opt, "muon"), "num_steps", 5),
        ("step counts: steps of muon", "1 on ranks 0, 2", "5 on rank 1"),
    ),
    "nan state": (
        lambda ddp, opt: written(child_of(opt, "adam").state_rows(0)["exp_avg_sq"], 0, math.nan),
        ("finite masters and states: exp_avg_sq of parameter", "is nan", "[rank 1]"),
    ),
    "infinite momentum": (
        lambda ddp, opt: written(child_of(opt, "muon").state_rows(0)["momentum"], 3, -math.inf),
        ("finite masters and states: momentum of parameter", "is -inf", "[rank 1]"),
    ),
    "moved": (move_parameter, ("bindings: parameter 'a_weight' no longer lies in its bucket",)),
    "unfrozen": (unfreeze, ("bindings: parameter 'extra' is trainable but in no bucket",)),
    "gradient elsewhere": (forget_gradient, ("bindings: parameter 'b_weight' has a gradient",)),
    "illegal state": (
        lambda ddp, opt: patched(bucket_of(opt, "c_bias"), "handle", Handle(object())),
        ("bucket states: bucket of", "used while a reduce is under way", "[rank 1]"),
    ),
    "state of one rank": (
        lambda ddp, opt: patched(bucket_of(opt, "a_weight"), "grad_state", GradState.REDUCED),
        ("bucket states: bucket of", "differs", "on ranks 0, 2", "reduced gradients on rank 1"),
    ),
    "inside": (fail_inside, ("check() itself: MemoryError: no memory", "[rank 1]")),
}


def run_faults() -> tuple[dict[str, str], dict[str, str]]:
    """Each fault in turn on rank 1: what every rank raises then, and after it was undone."""
    ddp, optimizer = trained(bucket_size=1000)
    messages, after = {}, {}
    for name, (fault, _) in FAULTS.items():
        with fault(ddp, optimizer) if ddp.groups.dp.rank == 1 else nullcontext():
            messages[name] = found(optimizer)
        after[name] = found(optimizer)
    return messages, after


def snapshot(ddp: Any, optimizer: Any) -> list[torch.Tensor]:
    """Everything that `check` could have written, gradients included."""
    tensors = [p.detach().clone() for p in ddp.module.parameters()]
    tensors += [bucket.grads.clone() for bucket in optimizer.runtime.buckets]
    tensors += [pub.master.row.clone() for pub in optimizer.runtime.publishers]
    for child in optimizer.runtime.children:
        for bucket in range(child.num_buckets):
            tensors += [row.clone() for row in child.state_rows(bucket).values()]
    return tensors


@dataclasses.dataclass
class Visit:
    """What one call of `check` raised and did."""

    moment: str
    message: str
    unchanged: bool
    states: str
    calls: dict[str, int]


def num_calls(groups: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for field in dataclasses.fields(groups):
        for name, count in getattr(groups, field.name).traffic.calls.items():
            total[name] = total.get(name, 0) + count
    return total


def overlap_begun(ddp: Any) -> bool:
    begun = (GradState.ACCUMULATING, GradState.REDUCING)
    overlaps = ddp.ddp_config.overlap_grad_reduce
    return overlaps and any(bucket.grad_state in begun for bucket in ddp.buckets)


def visit(ddp: Any, optimizer: Any, moment: str, visits: list[Visit]) -> None:
    if overlap_begun(ddp):
        try:
            check_optimizer(optimizer)
        except megatron_lw.StateError as error:
            assert "overlap_grad_reduce" in str(error)
            return
        raise AssertionError("reduces may be under way, so that a check could hang")
    ddp.finish_param_sync()
    before, calls = snapshot(ddp, optimizer), num_calls(ddp.groups)
    states = "/".join(bucket.grad_state.name for bucket in optimizer.runtime.buckets)
    message = found(optimizer)
    after, calls_after = snapshot(ddp, optimizer), num_calls(ddp.groups)
    visits.append(
        Visit(
            moment,
            message,
            all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            states,
            {n: c - calls.get(n, 0) for n, c in calls_after.items() if c != calls.get(n, 0)},
        )
    )


def at_every_moment(overlap: bool) -> tuple[list[Visit], dict[str, torch.Tensor]]:
    """`check` between any two calls of four steps; one parameter gets no gradient on rank 0."""
    groups = megatron_lw.ParallelGroups.create()
    settings = megatron_lw.DDPConfig(
        bucket_size=500, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    ddp = megatron_lw.DistributedDataParallel(Bag(SHAPES, MIXED), groups, settings)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    visits: list[Visit] = []
    visit(ddp, optimizer, "built", visits)
    for step in range(4):
        optimizer.zero_grad()
        visit(ddp, optimizer, "cleared", visits)
        grads = integer_grads(SHAPES, groups.dp.rank, step)
        if groups.dp.rank == 0:
            del grads["b_weight"]
        with ddp.no_sync():
            ddp(grads).backward()
        visit(ddp, optimizer, "accumulated", visits)
        ddp(grads).backward()
        if step == 2:
            ddp.finish_grad_sync()
        visit(ddp, optimizer, "backward", visits)
        optimizer.step()
        visit(ddp, optimizer, "stepped", visits)
        if step == 1:
            halved = {name: value / 2 for name, value in ddp.state_dict().items()}
            ddp.load_state_dict(halved)
            assert found(optimizer) == "", "weights were loaded"
    return visits, {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


def parallel(sizes: dict[str, int], faults: list[str]) -> tuple[str, dict[str, str], str]:
    """`check` of a divided model: after a step, with each fault on rank 1, and after all."""
    groups = megatron_lw.ParallelGroups.create(**sizes)
    specs = DIVIDED if groups.pp.size == 1 else STAGES
    values = initial_values({name: spec.shape for name, spec in specs.items()})
    model = Bag({}, torch.float32)
    for name, tensor in mine(specs, groups).items():
        spec = specs[name]
        part = part_of(spec, values[name], tensor.size, tensor.rank)
        param = torch.nn.Parameter(part.bfloat16())
        megatron_lw.annotate(
            param,
            tp_dim=spec.tp_dim,
            tied=spec.tied,
            expert=spec.expert is not None,
            embedding=spec.embedding,
        )
        model.register_parameter(name, param)
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    ddp({name: torch.ones_like(param) for name, param in model.named_parameters()}).backward()
    optimizer.step()
    clean = found(optimizer)
    messages = {}
    for name in faults:
        with first_state_written(optimizer, name) if groups.world.rank == 1 else nullcontext():
            messages[name] = found(optimizer)
    return clean, messages, found(optimizer)


def first_state_written(optimizer: Any, name: str) -> Any:
    """The first element of this rank's row of the bucket of `name`, in its child's first state."""
    entry = next(e for e in held_buckets(optimizer.runtime) if name in e.bucket.names)
    return written(next(iter(entry.states.values())), 0, 0.375)


DIVIDED = {
    "a_weight": Spec((48, 24), tp_dim=0),
    "router_weight": Spec((8, 24)),
    "norm_weight": Spec((24,)),
    "e0_weight": Spec((48, 24), tp_dim=0, expert=0),
    "e0_bias": Spec((24,), expert=0),
    "e1_weight": Spec((48, 24), tp_dim=0, expert=1),
    "e1_bias": Spec((24,), expert=1),
}
STAGES = {
    "stem_weight": Spec((24, 24), stage=0),
    "emb_weight": Spec((30, 8), stage=None, tied="embedding", embedding=True),
    "tail_weight": Spec((30, 20), stage=1),
}


def broken() -> str:
    _, optimizer = trained()
    optimizer.model_chunks[0].broken = "stage 'muon'"
    try:
        check_optimizer(optimizer)
    except megatron_lw.StateError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def out_of_step() -> tuple[str, str, str]:
    """Rank 1 has not yet made a gather that rank 0 has started; later it makes it."""
    world = dist.group.WORLD
    handles = {"world": world, "control": world, "dp": dist.new_group([0, 1])}
    groups = megatron_lw.ParallelGroups.from_torch(handles)
    _, optimizer = trained(groups=groups)
    before = found(optimizer, collectives=True)
    buffer = torch.full((2,), float(groups.dp.rank))
    late = Handle()
    if groups.dp.rank == 0:
        late = collectives.all_gather_rows(buffer, groups.dp, async_op=True)
    message = found(optimizer, collectives=True)
    if groups.dp.rank == 1:
        late = collectives.all_gather_rows(buffer, groups.dp, async_op=True)
    late.wait()
    assert buffer.tolist() == [0.0, 1.0]
    return before, message, found(optimizer, collectives=True)


def orders() -> tuple[str, str, str, list[object]]:
    """Steps make the same calls; then one rank claims another order, then one call more."""
    ddp, optimizer = trained()
    groups = ddp.groups
    messages = []
    for extra in ((), ("all_gather", "all_reduce"), ("all_reduce",)):
        try:
            with same_calls(groups):
                backward(ddp, optimizer, 1)
                optimizer.step()
                made = extra if groups.world.rank == 1 else sorted(extra, reverse=True)
                for name in made if len(extra) != 1 or groups.world.rank else ():
                    groups.dp.traffic.add(name, 0)
            messages.append("")
        except InvariantError as error:
            messages.append(str(error))
    return *messages, [groups.dp.traffic.log]
