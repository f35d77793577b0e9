"""Faults of one rank inside a step, and what every rank makes of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import megatron_lw
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.check import check_optimizer
from tests.distributed.cases import Bag, integer_grads
from tests.distributed.check_cases import bucket_of, child_of, patched, publisher_of

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_weight": (24, 56), "d_bias": (100,)}
CONFIG = {"optimizer": "muon", "lr": 0.05}
RANKS = 3
FAULTY = 1
SECONDS = 2.0

Action = Callable[..., Any]
Patch = Callable[[Any, Action], AbstractContextManager[Any]]


def replaced(target: Any, name: str, action: Action) -> AbstractContextManager[Any]:
    """`action` runs in place of the method of that name, then the method."""
    original = getattr(target, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    return patched(target, name, instead)


POINTS: dict[str, Patch] = {
    "bindings": lambda o, act: replaced(bucket_of(o, "b_weight"), "check_bindings", act),
    "reduce": lambda o, act: replaced(bucket_of(o, "b_weight"), "begin_reduce", act),
    "average": lambda o, act: replaced(bucket_of(o, "b_weight"), "end_reduce", act),
    "stats": lambda o, act: replaced(megatron_lw.optimizer.stats, "sum_of_squares", act),
    "momentum": lambda o, act: replaced(child_of(o, "muon"), "update_momentum", act),
    "Newton-Schulz": lambda o, act: replaced(
        type(child_of(o, "muon")._newton_schulz), "orthogonalise", act
    ),
    "scales": lambda o, act: replaced(child_of(o, "muon"), "scale", act),
    "apply": lambda o, act: replaced(megatron_lw.optimizer.children.matrix, "shrink", act),
    "adam": lambda o, act: replaced(child_of(o, "adam"), "backend", act),
    "agree": lambda o, act: replaced(o._guard, "agree", act),
    "publish": lambda o, act: replaced(type(publisher_of(o, "b_weight").wire), "stage", act),
}
"""Where in a step a rank can be stopped: optimizer and what to do there -> the patch."""


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        error: type and text of what the step raised; empty if nothing.
        is_ours: whether it is a `LayerWiseError`.
        later: the same of what is tried afterwards, by name.
        weights_kept: whether all weights are bitwise what they were before the step.
        matrices: number of matrices that this rank orthogonalises.
    """

    error: str = ""
    is_ours: bool = False
    later: dict[str, str] = field(default_factory=dict)
    weights_kept: bool = False
    matrices: int = 0


def text_of(action: Action) -> tuple[str, bool]:
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", isinstance(error, megatron_lw.LayerWiseError)
    return "", False


class Training:
    """A model on three ranks with a process group of its own, after one good step."""

    def __init__(self, seconds: float = 60.0, **ddp_config: Any) -> None:
        self.handle = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=60))
        handles = {"world": self.handle, "dp": self.handle}
        self.groups = megatron_lw.ParallelGroups.from_torch(handles)
        config = megatron_lw.DDPConfig(bucket_size=1000, **ddp_config)
        model = Bag(SHAPES, torch.float32)
        self.ddp = megatron_lw.DistributedDataParallel(model, self.groups, config)
        settings = megatron_lw.OptimizerConfig(**CONFIG)
        self.optimizer = megatron_lw.get_megatron_optimizer(settings, [self.ddp])
        self.faulty = self.groups.dp.rank == FAULTY
        self.backward(0)
        self.optimizer.step()
        self.handle.set_timeout(timedelta(seconds=seconds))

    def backward(self, step: int, clear: bool = True) -> None:
        if clear:
            self.optimizer.zero_grad()
        self.ddp(integer_grads(SHAPES, self.groups.dp.rank, step)).backward()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.ddp.module.parameters()]

    def step_with(self, fault: AbstractContextManager[Any]) -> Outcome:
        """A second step, with a fault on one rank, and what is tried after it."""
        self.backward(1)
        before = self.weights()
        with fault if self.faulty else nullcontext():
            error, is_ours = text_of(self.optimizer.step)
        kept = all(torch.equal(a, b) for a, b in zip(before, self.weights(), strict=True))
        muon = child_of(self.optimizer, "muon")
        return Outcome(error, is_ours, weights_kept=kept, matrices=muon.num_orthogonalised)

    def afterwards(self, outcome: Outcome) -> Outcome:
        """Try to go on as if nothing had happened."""
        actions: dict[str, Action] = {
            "backward": lambda: self.backward(2),
            "step": self.optimizer.step,
            "start_param_sync": self.ddp.start_param_sync,
            "check": lambda: check_optimizer(self.optimizer),
        }
        outcome.later = {name: text_of(action)[0] for name, action in actions.items()}
        return outcome


def fail() -> None:
    raise MemoryError("injected")


def exceptions(points: list[str]) -> dict[str, Outcome]:
    """An exception on one rank at each point, each in a new training."""
    outcomes = {}
    for point in points:
        training = Training()
        outcome = training.step_with(POINTS[point](training.optimizer, fail))
        outcomes[point] = training.afterwards(outcome)
    return outcomes


def rendezvous() -> Group:
    """A group of its own, on which a rank that is stuck waits until the others have given up."""
    handle = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=60))
    return Group("rendezvous", tuple(range(RANKS)), dist.get_rank(), handle)


def stuck(points: list[str]) -> dict[str, Outcome]:
    """One rank stops at each point, and goes on only when the others have given up."""
    outcomes = {}
    for point in points:
        training, meeting = Training(SECONDS), rendezvous()
        met: list[bool] = []

        def meet(meeting: Group = meeting, met: list[bool] = met) -> None:
            if not met:
                met.append(True)
                collectives.all_reduce(torch.zeros(1), meeting)

        outcome = training.step_with(POINTS[point](training.optimizer, meet))
        meet()
        outcomes[point] = training.afterwards(outcome)
    return outcomes


def interrupted() -> Outcome:
    """Ctrl-C on one rank inside a child; the others wait for its exchange."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    training = Training(SECONDS)
    fault = POINTS["momentum"](training.optimizer, interrupt)
    return training.afterwards(training.step_with(fault))


def dead() -> None:
    """One rank dies inside of the reduce; the others raise what they saw."""
    training = Training(SECONDS)
    fault = POINTS["reduce"](training.optimizer, lambda: os._exit(17))
    training.backward(1)
    with fault if training.faulty else nullcontext():
        try:
            training.optimizer.step()
        finally:
            later = training.afterwards(Outcome()).later
            assert later["step"].startswith("StateError: the optimizer is broken"), later
            assert later["start_param_sync"].startswith("StateError"), later


def forgotten_zero_grad() -> tuple[str, str]:
    """One rank goes into the second backward without it, fails there and steps no more."""
    training = Training(SECONDS)
    if training.faulty:
        return text_of(lambda: training.backward(1, clear=False))[0], ""
    training.backward(1)
    return text_of(training.optimizer.step)[0], text_of(training.optimizer.step)[0]


def step_without_backward() -> tuple[Outcome, str]:
    """One rank comes to the next step with the gradients of the last; then all do it right."""
    training = Training()
    if not training.faulty:
        training.backward(1)
    before = training.weights()
    error, is_ours = text_of(training.optimizer.step)
    kept = all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    again, _ = text_of(training.optimizer.step)
    return training.afterwards(Outcome(error, is_ours, weights_kept=kept)), again


def failed_publish() -> Outcome:
    """One rank cannot publish one row; its gathers are made all the same."""
    training = Training(SECONDS)
    fault = POINTS["publish"](training.optimizer, fail)
    return training.afterwards(training.step_with(fault))


def waited_twice() -> tuple[str, str]:
    """A gather that another rank has not made, waited for by two readers one after the other."""
    meeting = rendezvous()
    handle = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=SECONDS))
    group = Group("dp", tuple(range(RANKS)), dist.get_rank(), handle)
    texts = ("", "")
    if group.rank != FAULTY:
        gather = collectives.all_gather_rows(torch.zeros(RANKS), group, async_op=True)
        texts = text_of(gather.wait)[0], text_of(gather.wait)[0]
    collectives.all_reduce(torch.zeros(1), meeting)
    return texts


def timeouts() -> tuple[float, float, float]:
    """Seconds: of the default group, of a group made without a word, of one made with."""
    silent = megatron_lw.ParallelGroups.create()
    asked = megatron_lw.ParallelGroups.create(timeout=timedelta(seconds=7))
    handles = (dist.group.WORLD, silent.dp.handle, asked.control.handle)
    cpu = torch.device("cpu")
    return tuple(h._get_backend(cpu).options._timeout.total_seconds() for h in handles)


def different_settings() -> tuple[str, bool, str]:
    """One rank's learning rate is another for one step."""
    training = Training()
    group = training.optimizer.param_groups[0]

    @contextmanager
    def other_rate():
        before, group["lr"] = group["lr"], 0.5
        try:
            yield
        finally:
            group["lr"] = before

    outcome = training.step_with(other_rate())
    training.backward(2)
    return outcome.error, outcome.weights_kept, text_of(training.optimizer.step)[0]
