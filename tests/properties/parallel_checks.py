"""What one process makes of a case, and the comparison with what every rank saw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from tests.properties.parallel_held import Held, Masters
from tests.properties.parallel_models import THRESHOLD, Case, Spec, Step
from tests.properties.parallel_shares import (
    checksum,
    gradient,
    holds,
    initial,
    part_of,
    place_of,
    poisoned,
    share_of,
    tokens_of,
)
from tests.reference import Reference, Settings

Phase = list[tuple[list[dict[str, Any]], dict[str, Any]]]


class Oracle:
    """One process over all tokens: whole parameters, each matrix of a stack by itself."""

    def __init__(self, case: Case) -> None:
        self.turn_to(case)
        values, settings = {}, {}
        for spec in self.specs.values():
            for name, value in self._entries(spec, initial(case, spec)).items():
                values[name] = value
                settings[name] = self._settings(spec)
        self.reference = Reference(values, settings, clip_grad=case.config["clip_grad"])

    def turn_to(self, case: Case) -> None:
        """Take the case as it is in another topology."""
        self.case = case
        self.specs = {spec.name: spec for spec in case.specs if spec.trainable}

    def load(self) -> None:
        """What a load changes: rows of padding are zero."""
        for name, spec in self.specs.items():
            if "logical_rows" in spec.tag:
                numel = self.reference.masters[name].numel()
                rows = self.reference._flat[name].detach()[:numel].view(spec.shape)
                rows[spec.tag["logical_rows"] :] = 0.0
                self.reference.masters[name][spec.tag["logical_rows"] :] = 0.0

    def _entries(self, spec: Spec, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameter as what the reference steps: its matrices, or the whole of it."""
        if spec.matrix(self.case.config["optimizer"]) is None or spec.matrices == 1:
            return {spec.name: whole}
        parts = whole.chunk(spec.matrices, 0)
        return {f"{spec.name}/{number}": part for number, part in enumerate(parts)}

    def _settings(self, spec: Spec) -> Settings:
        config = self.case.config
        return Settings(
            lr=config["lr"] if spec.lr is None else spec.lr,
            weight_decay=0.0 if len(spec.shape) == 1 else config["weight_decay"],
            matrix=spec.matrix(config["optimizer"]),
            nesterov=config["muon_nesterov"],
            scale_mode=config["muon_scale_mode"],
            parts=_blocks(spec) if spec.blocks else None,
        )

    def change_lr(self) -> None:
        """Halve every rate."""
        for settings in self.reference.settings.values():
            settings.lr *= 0.5

    def change_decay(self) -> None:
        """Halve every weight decay."""
        for settings in self.reference.settings.values():
            settings.weight_decay *= 0.5

    def step(self, number: int) -> tuple[bool, float | None, int | None]:
        """Step, unless the step is to be skipped; returns what `optimizer.step` should."""
        step = self.case.steps[number]
        grads, padding = {}, 0
        for spec in self.specs.values():
            grad = self._gradient(spec, number)
            padding += grad[spec.tag.get("logical_rows", len(grad)) :].numel() if grad.dim() else 0
            grads.update(self._entries(spec, grad))
        squares = sum(float(g.double().square().sum()) for g in grads.values())
        zeros = sum(int((g == 0).sum()) for g in grads.values()) - padding
        if step.kind == "break":
            self.load()
        if step.kind in ("fail", "break") or poisoned(self.case, step) is not None:
            return False, None, None
        if math.sqrt(squares) > THRESHOLD:
            return False, math.sqrt(squares), zeros
        self.reference.step(grads)
        return True, math.sqrt(squares), zeros

    def _gradient(self, spec: Spec, number: int) -> torch.Tensor:
        """Summed over a share's ranks, averaged, then summed over the shares of one token."""
        case, step = self.case, self.case.steps[number]
        axes = case.axes
        divisor = float(axes["dp"])
        if step.finalize == "tokens":
            divisor = float(sum(tokens_of(dp) for dp in range(axes["dp"])))
        if spec.kind == "fp32":
            divisor *= axes["tp"]
        ranks = (place_of(case, rank) for rank in range(case.ranks))
        shares = sorted({share_of(spec, place) for place in ranks if holds(spec, place)})
        sums: dict[tuple[int, ...], torch.Tensor] = {}
        for share in shares:
            for micro in range(step.micro_batches):
                grad = gradient(case, spec, share, number, micro)
                if grad is not None:
                    sums[share[:-1]] = sums.get(share[:-1], torch.zeros(spec.shape)) + grad
        return sum((total / divisor for total in sums.values()), torch.zeros(spec.shape))

    def master(self, spec: Spec) -> torch.Tensor:
        """The whole master."""
        parts = self._entries(spec, torch.empty(spec.shape))
        masters = [self.reference.masters[name] for name in parts]
        return masters[0] if len(masters) == 1 else torch.cat(masters)


def _blocks(spec: Spec) -> tuple[tuple[int, ...], ...]:
    """The rows of each fused matrix."""
    edges = [0, *accumulate(spec.blocks or ())]
    return tuple(tuple(range(low, high)) for low, high in pairwise(edges))


def check(case: Case, reports: list[Phase]) -> None:
    """Hold every rank's report of every phase against one process."""
    oracle, held = Oracle(case), Held(case)
    for phase, ((part, numbers), here) in enumerate(zip(case.phases, reports, strict=True)):
        _check_collectives(here)
        events = zip(*(report for report, _ in here), strict=True)
        if phase:
            oracle.turn_to(part)
            oracle.load()
            held.turn_to(part)
            found = next(events)
            assert {event["what"] for event in found} == {"load"}
            held.update(_assemble(part, here, found), success=False, loaded=False)
        for number in numbers:
            _check_step(oracle, held, here, number, events)
        assert next(events, None) is None
        for rank, (_, facts) in enumerate(here):
            _check_weights(held, rank, facts["weights"], all_of_them=True)


def _check_step(
    oracle: Oracle, held: Held, reports: Phase, number: int, events: Iterator[Any]
) -> None:
    """All that was reported around one step."""
    step = oracle.case.steps[number]
    for what in _expected_events(step):
        if what == "change_lr":
            oracle.change_lr()
            continue
        if what == "change_decay":
            oracle.change_decay()
            continue
        found = next(events)
        assert {event["what"] for event in found} == {what}
        if what == "forward":
            for rank, event in enumerate(found):
                _check_weights(held, rank, event["seen"])
            continue
        success = _check_result(oracle.step(number), [event["result"] for event in found])
        masters = _assemble(oracle.case, reports, found)
        held.update(masters, success=success, loaded=step.kind == "break")
        _check_masters(oracle, held.masters)


def _expected_events(step: Step) -> list[str]:
    """What a step reports, in order."""
    before, between, middle, after = (
        [{"evaluate": "forward"}.get(each, each) for each in part] for part in step.operations
    )
    events = [*before, *between, *["forward"] * step.micro_batches, *middle, "step", *after]
    return [event for event in events if event in ("forward", "change_lr", "change_decay", "step")]


def _check_collectives(reports: Phase) -> None:
    """All ranks of a group have made the same calls on it."""
    for name in reports[0][1]["calls"]:
        seen: dict[tuple[int, ...], dict[str, int]] = {}
        for _, facts in reports:
            ranks, calls = facts["calls"][name]
            assert seen.setdefault(ranks, calls) == calls, name


def _check_result(expected: tuple[Any, ...], results: list[tuple[Any, ...]]) -> bool:
    success, norm, zeros = expected
    for result in results:
        assert repr(result) == repr(results[0])
    assert results[0][0] is success
    if norm is None:
        assert results[0][1] is None
    else:
        assert results[0][1] == pytest.approx(norm, rel=1e-5)
        assert results[0][2] == zeros
    return success


def _assemble(case: Case, reports: Phase, found: tuple[dict[str, Any], ...]) -> Masters:
    """Each rank's local masters, put together from the rows of the ranks that hold them."""
    slots: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}
    for rank, event in enumerate(found):
        for name, start, values in event["masters"]:
            slots.setdefault((name, rank), []).append((start, values))
    masters = {}
    for spec in case.specs:
        for rank in range(case.ranks):
            place = place_of(case, rank)
            if spec.trainable and holds(spec, place):
                shape = part_of(case, spec, torch.empty(spec.shape), place).shape
                over = reports[rank][1]["reduce_ranks"][spec.name]
                parts = sorted((p for r in over for p in slots.get((spec.name, r), [])), key=_start)
                flat = torch.cat([torch.empty(0), *(values for _, values in parts)])
                ends = [start + len(values) for start, values in parts]
                assert [start for start, _ in parts] == [0, *ends][: len(parts)], spec.name
                masters[spec.name, rank] = flat.view(shape)
    return masters


def _start(part: tuple[int, torch.Tensor]) -> int:
    return part[0]


def _check_masters(oracle: Oracle, masters: Masters) -> None:
    """Against the reference, and replicas against each other."""
    case = oracle.case
    for spec in oracle.specs.values():
        copies: dict[int, torch.Tensor] = {}
        whole = oracle.master(spec)
        for rank in range(case.ranks):
            place = place_of(case, rank)
            if not holds(spec, place):
                continue
            master, expected = masters[spec.name, rank], part_of(case, spec, whole, place)
            part = place.tp if spec.expert is None else place.etp
            part = 0 if spec.tp_dim is None else part
            part += 100 * place.ep if spec.expert == -1 else 0
            assert torch.equal(copies.setdefault(part, master), master), spec
            if case.exact and spec.matrix(case.config["optimizer"]) is None:
                assert torch.equal(master, expected), spec
            else:
                # Weights have a root mean square of one; a norm near zero would prove nothing.
                size = max(float(expected.norm()), math.sqrt(expected.numel()))
                assert float((master - expected).norm()) <= 1e-5 * size, spec


def _check_weights(
    held: Held, rank: int, seen: dict[str, int], *, all_of_them: bool = False
) -> None:
    """What a rank read is its masters in the format of the weight, bit for bit."""
    place = place_of(held.case, rank)
    specs = {spec.name: spec for spec in held.case.specs if holds(spec, place)}
    assert set(seen) == set(specs) if all_of_them else set(seen) <= set(specs)
    for name, value in seen.items():
        assert value == checksum(held.weight(specs[name], rank)), specs[name]


def features(case: Case, reports: list[Phase]) -> set[str]:
    """What an example contained."""
    found = {spec.kind for spec in case.specs}
    found |= {f"use {spec.use}" for spec in case.specs if spec.trainable}
    found |= {f"dtype {spec.dtype}" for spec in case.specs}
    found |= {f"recipe {spec.recipe}" for spec in case.specs if spec.recipe is not None}
    found |= {f"step {step.kind}" for step in case.steps}
    found |= {f"finalize {step.finalize}" for step in case.steps}
    found |= {op for step in case.steps for part in step.operations for op in part}
    found |= {f"{name} {value}" for name, value in case.ddp_config.items()}
    found |= {f"exact {case.exact}", f"optimizer {case.config['optimizer']}"}
    steps = [event for phase in reports for event in phase[0][0] if event["what"] == "step"]
    facts = [facts for phase in reports for _, facts in phase]
    conditions = {
        "divided": any(spec.tp_dim is not None for spec in case.specs),
        "accumulate": any(step.micro_batches > 1 for step in case.steps),
        "absent": any(step.absent for step in case.steps),
        "clip": case.config["clip_grad"] > 0,
        "garbage": case.garbage,
        "background": case.background and "save" in found,
        "moved": case.later is not None and 0 < case.cut < len(case.steps),
        "other ranks": len({part.ranks for part, _ in case.phases}) > 1,
        "late": case.late and any(event["gathering"] for event in steps),
        "skipped": any(not event["result"][0] for event in steps),
        "reducing": any(event["reducing"] for event in steps),
        "gathering": any(event["gathering"] for event in steps),
        "several buckets": max(each["buckets"] for each in facts) > 1,
        "nothing held": any(each["buckets"] == 0 for each in facts),
        **{what: any(each[what] for each in facts) for what in ("mixed", "empty_row", "cut")},
    }
    return found | {what for what, is_so in conditions.items() if is_so}
