"""What one rank does with a case: build its part of the model, train, and report what it saw."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw import fp8
from megatron_lw.dist_checkpointing import CheckpointWarning, load, save, wait
from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.finalize import finalize_model_grads
from tests.distributed.cases import master_parts
from tests.distributed.fp8_cases import RECIPES
from tests.late_gather import LateGather
from tests.properties.parallel_chunks import Chunk
from tests.properties.parallel_models import Case, Spec, Step
from tests.properties.parallel_shares import (
    checksum,
    dtype_of,
    gradient,
    holds,
    initial,
    part_of,
    place_of,
    poisoned,
    share_of,
    tokens_of,
)

Tensors = dict[str, torch.Tensor]


class Breaking:
    """A weight rule that fails, after the children have stepped."""

    name = "injected"

    def apply(self, kept: Kept) -> None:
        """Fail; the step tells the other ranks."""
        with kept.keeping("stage 'injected'"):
            raise MemoryError("injected")


class Trainer:
    """One rank's part of a case.

    Args:
        case: in one topology.
        folder: for checkpoints.
        junk: added to every weight, where a checkpoint is to be loaded.
    """

    def __init__(self, case: Case, folder: Path, junk: float = 0.0) -> None:
        self.case = case
        self.folder = folder
        self.saves = 0
        self.junk = junk
        self.groups = megatron_lw.ParallelGroups.create(**case.sizes)
        self.rank = self.groups.world.rank
        self.place = place_of(case, self.rank)
        self.specs = {s.name: s for s in case.specs if holds(s, self.place)}
        numbers = sorted({spec.chunk for spec in case.specs})
        self.chunks = [self._chunk(number) for number in numbers]
        config = megatron_lw.OptimizerConfig(**case.config)
        overrides = megatron_lw.standard_overrides(config)
        slow = tuple(spec.name for spec in case.specs if spec.lr is not None)
        if slow:
            overrides[megatron_lw.ParamKey(name=slow)] = {"max_lr": case.config["lr"] / 2}
        self.optimizer = megatron_lw.get_megatron_optimizer(config, self.chunks, overrides)
        self.report: list[dict[str, Any]] = []

    def _chunk(self, number: int) -> megatron_lw.DistributedDataParallel:
        mine = {name: spec for name, spec in self.specs.items() if spec.chunk == number}
        generator = torch.Generator().manual_seed(self.case.seed + self.rank)
        order = torch.randperm(len(mine), generator=generator).tolist()
        params = {}
        for name in [list(mine)[i] for i in order]:
            params[name] = self._parameter(mine[name])
        config = megatron_lw.DDPConfig(**self.case.ddp_config)
        names = megatron_lw.NameMap(lambda _, local: local.split(".")[1])
        return megatron_lw.DistributedDataParallel(
            Chunk(params, mine), self.groups, config, names=names
        )

    def _parameter(self, spec: Spec) -> nn.Parameter:
        value = part_of(self.case, spec, initial(self.case, spec), self.place).clone()
        first = self.place.dp if spec.expert is None else self.place.edp
        if spec.kind == "fp32":
            first = self.place.replica
        if spec.kind == "tied":
            first += self.place.pp
        if self.case.garbage and first:
            value += 1.0
        value = (value + self.junk).to(dtype_of(spec))
        if spec.recipe is not None:
            value = fp8.QuantisedTensor.from_values(value, RECIPES[spec.recipe], keep_initial=True)
        param = nn.Parameter(value, requires_grad=spec.trainable)
        matrices = spec.matrices
        if spec.expert == -1:
            matrices //= self.case.axes["ep"]
        return megatron_lw.annotate(
            param,
            tp_dim=spec.tp_dim,
            blocks=spec.blocks,
            expert=spec.expert is not None,
            matrices=matrices,
            **spec.tag,
        )

    def run(self, numbers: range) -> None:
        """These steps of the case."""
        for number in numbers:
            step = self.case.steps[number]
            before, between, middle, after = step.operations
            self._operate(before, number)
            self.optimizer.zero_grad()
            self._operate(between, number)
            for micro in range(step.micro_batches):
                self._backward(number, micro, last=micro + 1 == step.micro_batches)
            reducing = sum(b.handle.outstanding for c in self.chunks for b in c.buckets)
            self._operate(middle, number)
            self._finalize(step)
            result = self._step(step)
            gathering = sum(p.outstanding for c in self.chunks for p in c.publishers)
            for chunk in self.chunks if self.case.late else []:
                LateGather.delay(chunk.publishers)
            self.report.append(
                {
                    "what": "step",
                    "result": result,
                    "masters": master_parts(self.optimizer.runtime.publishers),
                    "reducing": reducing,
                    "gathering": gathering,
                }
            )
            self._operate(after, number)
        wait(self.optimizer)

    def _step(self, step: Step) -> tuple[bool, float | None, int | None]:
        """A step, or what is left of one that has to fail."""
        faulty = self.rank == step.poison % self.case.ranks
        if step.kind == "fail":
            group = self.optimizer.param_groups[step.poison % len(self.optimizer.param_groups)]
            lr = group["lr"]
            group["lr"] = -1.0 if faulty else lr
            failed = self._has_failed(megatron_lw.LayerWiseError)
            group["lr"] = lr
            return (not failed, None, None)
        if step.kind == "break":
            self.save()
            self.optimizer.weight_rules += [Breaking()] if faulty else []
            failed = self._has_failed(megatron_lw.StateError)
            self.optimizer.weight_rules.clear()
            failed = self._has_failed(megatron_lw.StateError) and failed
            self.load()
            return (not failed, None, None)
        return self.optimizer.step()

    def _has_failed(self, kind: type[Exception]) -> bool:
        try:
            self.optimizer.step()
        except kind:
            return True
        return False

    def save(self) -> None:
        """A further checkpoint."""
        self.saves += 1
        save(
            self.folder,
            self.chunks,
            self.optimizer,
            step=self.saves,
            background=self.case.background,
            keep_last=2,
        )

    def load(self) -> None:
        """The newest checkpoint; what is warned of is another number of chunks or ranks."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            load(self.folder, self.chunks, self.optimizer)

    def _operate(self, operations: tuple[str, ...], number: int) -> None:
        for operation in operations:
            if operation.startswith("change"):
                for group in self.optimizer.param_groups:
                    group["lr" if operation == "change_lr" else "weight_decay"] *= 0.5
            elif operation.endswith("sync"):
                self._sync(operation)
            elif operation == "evaluate":
                with torch.no_grad():
                    self._forward({}, number)
            elif operation == "check":
                self.optimizer.check(collectives=True)
            elif operation == "save":
                self.save()
            else:
                self.optimizer.zero_grad()

    def _sync(self, operation: str) -> None:
        for chunk in self.chunks:
            if operation != "finish_sync":
                chunk.start_param_sync()
            if operation != "start_sync":
                chunk.finish_param_sync()

    def _forward(self, grads: Tensors, number: int) -> torch.Tensor:
        loss, seen = torch.zeros(()), {}
        for index, chunk in enumerate(self.chunks):
            names = sorted(chunk.module.specs)
            seed = self.case.seed + 10 * number + self.rank + index
            order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
            part, found = chunk([names[i] for i in order.tolist()], grads)
            loss, seen = loss + part, {**seen, **found}
        self.report.append({"what": "forward", "seen": seen})
        return loss

    def _backward(self, number: int, micro: int, *, last: bool) -> None:
        grads = {}
        poison = poisoned(self.case, self.case.steps[number]) if last else None
        for name, spec in self.specs.items():
            whole = gradient(self.case, spec, share_of(spec, self.place), number, micro)
            hurt = poison == (name, self.rank)
            if hurt and whole is None:
                whole = torch.zeros(spec.shape)
            if whole is not None:
                grads[name] = part_of(self.case, spec, whole, self.place)
            if hurt:
                grads[name] = grads[name].clone()
                grads[name].view(-1)[0] = [float("inf"), float("nan")][number % 2]
        with ExitStack() as stack:
            if not last:
                for chunk in self.chunks:
                    stack.enter_context(chunk.no_sync())
            loss = self._forward(grads, number)
            if loss.requires_grad:
                loss.backward()

    def _finalize(self, step: Step) -> None:
        if step.finalize == "hook":
            finalize_model_grads(self.chunks, pg_collection=self.groups)
        if step.finalize == "tokens":
            is_last = self.place.pp + 1 == self.case.axes["pp"]
            tokens = torch.tensor(tokens_of(self.place.dp) if is_last else -1)
            finalize_model_grads(self.chunks, tokens, self.groups)

    def facts(self) -> dict[str, Any]:
        """What the parent checks besides the report."""
        plans = self.optimizer.runtime.plans.values()
        weights = [tensors for chunk in self.chunks for tensors in chunk.state_dict().items()]
        groups = {f.name: getattr(self.groups, f.name) for f in fields(self.groups)}
        buckets = self.optimizer.runtime.buckets
        return {
            "weights": {name.split(".")[1]: checksum(tensor) for name, tensor in weights},
            "calls": {name: (g.ranks, dict(g.traffic.calls)) for name, g in groups.items()},
            "reduce_ranks": {name: b.group.ranks for b in buckets for name in b.names},
            "buckets": len(buckets),
            "mixed": any(bucket.weights is None for bucket in buckets),
            "empty_row": any(not list(bucket.row_slots()) for bucket in buckets),
            "cut": any(len(plan.pieces.matrix) > len(plan.owner) for plan in plans),
        }


def run_case(case: Case, folder: Path, phase: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run one phase of a case on this rank; what was seen, and facts.

    The groups are destroyed at the end: gloo keeps threads for each process group, and hundreds of
    cases in one worker would drown the machine in them.
    """
    part, numbers = case.phases[phase]
    trainer = Trainer(part, folder, junk=7.0 * phase)
    if phase:
        trainer.load()
        trainer.saves = len(case.steps) * 10
        masters = master_parts(trainer.optimizer.runtime.publishers)
        trainer.report.append({"what": "load", "masters": masters})
    trainer.run(numbers)
    if not phase and case.later is not None:
        trainer.save()
        wait(trainer.optimizer)
    facts = trainer.facts()
    trainer.groups.destroy()
    return trainer.report, facts
