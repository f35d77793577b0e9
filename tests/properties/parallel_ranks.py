"""What one rank does with a case: build its part of the model, train, and report what it saw."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw.distributed.finalize import finalize_model_grads
from tests.late_gather import LateGather
from tests.properties.parallel_models import Case, Spec, Step
from tests.properties.parallel_shares import (
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


def checksum(x: torch.Tensor) -> int:
    """CRC-32 of the bytes of a tensor."""
    flat = x.detach().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


class Cell(nn.Module):
    """One parameter with a forward of its own."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.weight = param

    def forward(self, use: Any) -> torch.Tensor:
        return use(self.weight)


class Table(nn.Embedding):
    """An embedding, recognised by its class."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(*param.shape, _weight=param.detach())
        self.weight = param

    def forward(self, use: Any) -> torch.Tensor:
        return use(self.weight)


class Chunk(nn.Module):
    """A model chunk: parameters in modules, outside of modules, and used from outside."""

    def __init__(self, params: dict[str, nn.Parameter], specs: dict[str, Spec]) -> None:
        super().__init__()
        self.specs = specs
        self.cells = nn.ModuleDict()
        self.loose = nn.ParameterDict()
        for name, param in params.items():
            if specs[name].kind == "table":
                self.cells[name] = Table(param)
            elif specs[name].use == "loose":
                self.loose[name] = param
            else:
                self.cells[name] = Cell(param)

    def forward(self, order: list[str], grads: dict[str, torch.Tensor]) -> Any:
        """The loss that has these gradients, and checksums of the weights that it read."""
        loss, seen = torch.zeros(()), {}
        for name in order:

            def use(weight: torch.Tensor, name: str = name) -> torch.Tensor:
                seen[name] = checksum(weight)
                if name not in grads:
                    return torch.zeros(())
                if self.specs[name].use == "twice":
                    half = grads[name] / 2
                    return (weight.float() * half).sum() + (weight.float() * half).sum()
                return (weight.float() * grads[name]).sum()

            if name in self.loose:
                loss = loss + use(self.loose[name])
            elif self.specs[name].use == "borrowed":
                loss = loss + use(self.cells[name].weight)
            else:
                loss = loss + self.cells[name](use)
        return loss, seen


class Trainer:
    """One rank's part of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
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
        param = nn.Parameter(value.to(dtype_of(spec)), requires_grad=spec.trainable)
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

    def run(self) -> None:
        """All steps of the case."""
        for number, step in enumerate(self.case.steps):
            before, between, middle, after = step.operations
            self._operate(before, number)
            self.optimizer.zero_grad()
            self._operate(between, number)
            for micro in range(step.micro_batches):
                self._backward(number, micro, last=micro + 1 == step.micro_batches)
            reducing = sum(b.handle.outstanding for c in self.chunks for b in c.buckets)
            self._operate(middle, number)
            self._finalize(step)
            result = self.optimizer.step()
            gathering = sum(p.outstanding for c in self.chunks for p in c.publishers)
            for chunk in self.chunks if self.case.late else []:
                LateGather.delay(chunk.publishers)
            self.report.append(
                {
                    "what": "step",
                    "result": result,
                    "masters": self._masters(),
                    "reducing": reducing,
                    "gathering": gathering,
                }
            )
            self._operate(after, number)

    def _operate(self, operations: tuple[str, ...], number: int) -> None:
        for operation in operations:
            if operation == "evaluate":
                with torch.no_grad():
                    self._forward({}, number)
            if operation == "change_lr":
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5
            if operation == "check":
                self.optimizer.check(collectives=True)
            if operation == "zero_grad":
                self.optimizer.zero_grad()
            for chunk in self.chunks:
                if operation in ("start_sync", "sync"):
                    chunk.start_param_sync()
                if operation in ("finish_sync", "sync"):
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

    def _masters(self) -> list[tuple[str, int, torch.Tensor]]:
        return [
            (name, slot.param_start, publisher.master.row[slot.row_start :][: slot.numel].clone())
            for publisher in self.optimizer.runtime.publishers
            for name, slot in publisher.bucket.row_slots()
        ]

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


def run_case(case: Case) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a case on this rank.

    The groups are destroyed at the end: gloo keeps threads for each process group, and hundreds of
    cases in one worker would drown the machine in them.
    """
    trainer = Trainer(case)
    trainer.run()
    facts = trainer.facts()
    trainer.groups.destroy()
    return trainer.report, facts
