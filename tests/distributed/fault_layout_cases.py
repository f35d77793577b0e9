"""Faults in a layout with everything in it: two chunks, tensor and expert parallelism, overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import megatron_lw
from megatron_lw.distributed.calls import compare_call_counts
from megatron_lw.optimizer import stats
from megatron_lw.optimizer.children.exchange import RowExchange, TensorExchange
from megatron_lw.optimizer.masters import MasterRow
from tests.distributed.cases import Bag, integer_grads
from tests.distributed.check_cases import bucket_of, child_of, patched, publisher_of
from tests.distributed.fault_cases import Action, fail, replaced, text_of

RANKS = 4
CHUNKS = (
    {"a_weight": (24, 40), "s_scale": (24,), "r_scale": (30,), "f_weight": (40, 24)},
    {"b_weight": (24, 56), "e_weight": (24, 32), "d_bias": (100,)},
)
TAGS = {
    "a_weight": {"tp_dim": 0},
    "s_scale": {"sequence_parallel": True},
    "r_scale": {"keep_fp32": True},
    "e_weight": {"expert": True},
}
CONFIG = {"optimizer": "muon", "lr": 0.05, "clip_grad": 1.0}

Fault = Callable[[Any], AbstractContextManager[Any]]


@contextmanager
def without_rate(optimizer: Any) -> Iterator[None]:
    group = optimizer.param_groups[-1]
    rate = group.pop("lr")
    try:
        yield
    finally:
        group["lr"] = rate


def expert_of(optimizer: Any) -> str:
    """The expert that this rank has."""
    return f"e{optimizer.groups.ep.rank}_weight"


def on_class(cls: type, name: str) -> Fault:
    return lambda optimizer: replaced(cls, name, fail)


UNTOUCHED: dict[str, Fault] = {
    "bindings": lambda o: replaced(bucket_of(o, "b_weight"), "check_bindings", fail),
    "settings": without_rate,
    "reduce": lambda o: replaced(bucket_of(o, "f_weight"), "begin_reduce", fail),
    "average": lambda o: replaced(bucket_of(o, expert_of(o)), "end_reduce", fail),
    "sequence-parallel sum": lambda o: replaced(torch, "cat", fail),
    "stats": lambda o: replaced(stats, "sum_of_squares", fail),
}
AGREED: dict[str, Fault] = {
    "clip": lambda o: replaced(o, "_scale_gradients", fail),
    "momentum": lambda o: replaced(child_of(o, "muon"), "update_momentum", fail),
    "pack": on_class(RowExchange, "pack_out"),
    "unpack": on_class(RowExchange, "finish_out"),
    "pack shards": on_class(TensorExchange, "pack_out"),
    "unpack shards": on_class(TensorExchange, "finish_out"),
    "return shards": on_class(TensorExchange, "pack_back"),
    "land shards": on_class(TensorExchange, "finish_back"),
    "return": on_class(RowExchange, "pack_back"),
    "land": on_class(RowExchange, "finish_back"),
    "adam": lambda o: replaced(child_of(o, "adam"), "backend", fail),
}


@dataclass
class Seen:
    """What one rank saw of a fault.

    Attributes:
        error: what the step with the fault raised.
        kept: whether that step left the weights as they were.
        again: what the step after it raised.
        weights: after that step.
    """

    error: str = ""
    kept: bool = False
    again: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Layout:
    """Two chunks on four ranks: tensor parallelism 2, two experts, each on two ranks."""

    def __init__(self, groups: megatron_lw.ParallelGroups, **overlap: bool) -> None:
        self.rank = groups.world.rank
        self.chunks = []
        for shapes in CHUNKS:
            renamed = {self.local(n, groups): shape for n, shape in shapes.items()}
            model = Bag(renamed, torch.float32)
            for name, tag in TAGS.items():
                if name in shapes:
                    local = model.get_parameter(self.local(name, groups))
                    megatron_lw.annotate(local, **tag)
            config = megatron_lw.DDPConfig(bucket_size=900, **overlap)
            self.chunks.append(megatron_lw.DistributedDataParallel(model, groups, config))
        settings = megatron_lw.OptimizerConfig(
            **CONFIG, overlap_param_gather=overlap.get("overlap_param_gather", False)
        )
        self.optimizer = megatron_lw.get_megatron_optimizer(settings, self.chunks)
        for step in range(2):
            self.backward(step)
            self.optimizer.step()

    @staticmethod
    def local(name: str, groups: megatron_lw.ParallelGroups) -> str:
        return f"e{groups.ep.rank}_weight" if name == "e_weight" else name

    def backward(self, step: int, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            shapes = {n: tuple(p.shape) for n, p in chunk.module.named_parameters()}
            grads = integer_grads(shapes, self.rank, step)
            chunk({name: grad * scale for name, grad in grads.items()}).backward()

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: value.detach().clone()
            for chunk in self.chunks
            for name, value in chunk.state_dict().items()
        }

    def try_step(
        self, fault: Fault | None, faulty: tuple[int, ...], before: Action | None = None
    ) -> Seen:
        """The third step, with the fault on some ranks from backward on, and a fourth."""
        seen, weights = Seen(), self.weights()
        with ExitStack() as stack:
            if fault is not None and self.rank in faulty:
                stack.enter_context(fault(self.optimizer))
            self.backward(2)
            if before is not None:
                before()
            seen.error = text_of(self.optimizer.step)[0]
        after = self.weights()
        seen.kept = all(torch.equal(weights[name], after[name]) for name in weights)
        self.backward(3)
        seen.again = text_of(self.optimizer.step)[0]
        seen.weights = self.weights()
        return seen


def make_groups() -> megatron_lw.ParallelGroups:
    return megatron_lw.ParallelGroups.create(tensor=2, expert=2, expert_tensor=1)


def faults(overlap: bool, faulty: tuple[int, ...]) -> dict[str, Seen]:
    """Every fault in turn, on the same groups, which stay in step; and "none"."""
    groups = make_groups()
    both = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    found = {}
    points: dict[str, Fault | None] = {"none": None, **UNTOUCHED, **AGREED}
    for name, fault in points.items():
        found[name] = Layout(groups, **both).try_step(fault, faulty)
        compare_call_counts(groups)
    return found


def skipped() -> Seen:
    """As `faults`, of the recovery alone: the third step is never tried."""
    layout = Layout(make_groups())
    layout.backward(3)
    return Seen(again=text_of(layout.optimizer.step)[0], weights=layout.weights())


def failed_publish(overlap: bool) -> str:
    """A row of the chunk that is published first cannot be cast on rank 1."""
    groups = make_groups()
    layout = Layout(groups, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    layout.backward(2)
    with ExitStack() as stack:
        if layout.rank == 1:
            wire = publisher_of(layout.optimizer, "a_weight").wire
            stack.enter_context(replaced(wire, "stage", fail))
        error = text_of(layout.optimizer.step)[0]
    layout.weights()
    compare_call_counts(groups)
    return error


def finalized_by_hand(point: str) -> tuple[str, str, Seen]:
    """`finalize_model_grads` fails on rank 1, twice; then all ranks step all the same."""
    layout = Layout(make_groups())
    errors = []

    def finalize() -> None:
        wrong = point == "num_tokens" and layout.rank == 1
        tokens = torch.ones(3 if wrong else 1, dtype=torch.int64)
        for _ in range(2):
            errors.append(
                text_of(lambda: megatron_lw.finalize_model_grads(layout.chunks, tokens))[0]
            )

    seen = layout.try_step(UNTOUCHED.get(point), (1,), finalize)
    return errors[0], errors[1], seen


def failed_seed(fails: bool) -> Seen:
    """Weights are loaded, and the masters cannot follow them on rank 1 at the first attempt."""
    layout = Layout(make_groups())
    for chunk in layout.chunks:
        chunk.load_state_dict({name: value * 2 for name, value in chunk.state_dict().items()})
    if fails:
        return layout.try_step(on_class(MasterRow, "seed"), (1,))
    layout.backward(3)
    layout.optimizer.step()
    return Seen(weights=layout.weights())


def careful_statistics() -> list[tuple[str, str]]:
    """Measuring again fails on rank 2: a tiny gradient, then one that is not finite."""
    layout = Layout(make_groups())
    plain = torch.linalg.vector_norm

    def in_fp32_only(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs["dtype"] is torch.float64:
            fail()
        return plain(*args, **kwargs)

    tries = (
        (1e-20, lambda: patched(torch.linalg, "vector_norm", in_fp32_only)),
        (float("inf"), lambda: replaced(torch, "isfinite", fail)),
    )
    found = []
    for scale, fault in tries:
        layout.backward(2, scale)
        with fault() if layout.rank == 2 else nullcontext():
            error = text_of(layout.optimizer.step)[0]
        layout.backward(3)
        found.append((error, text_of(layout.optimizer.step)[0]))
    return found


def interrupted_before() -> tuple[str, str]:
    """Ctrl-C on one rank before its first collective of the step."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    groups = megatron_lw.ParallelGroups.single()
    ddp = megatron_lw.DistributedDataParallel(Bag({"a_weight": (8, 8)}, torch.float32), groups)
    optimizer = megatron_lw.get_megatron_optimizer(
        megatron_lw.OptimizerConfig(optimizer="adam", lr=0.1), [ddp]
    )
    with replaced(ddp, "check_bindings", interrupt):
        first = text_of(optimizer.step)[0]
    return first, text_of(optimizer.step)[0]
