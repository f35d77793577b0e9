"""What the digest of a plan sees, and what the planner refuses. All comparisons are exact."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.plan import PlanParam, plan_domain
from tests.unit.test_plan import matrix, model, vector


def test_digest_is_the_same_in_another_process() -> None:
    code = (
        "from tests.unit.test_plan import model, plan_domain\n"
        "print(plan_domain(reversed(model()), dp=4, tp=1).digest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == plan_domain(model(), dp=4, tp=1).digest()


CHANGES: dict[str, Any] = {
    "name": "other",
    "numel": 129,
    "child": "lion",
    "chunk": 1,
    "tied": "words",
    "sharded": True,
    "group": "decay",
}


@pytest.mark.parametrize("field", CHANGES)
def test_digest_sees_every_fact_of_an_elementwise_parameter(field: str) -> None:
    before, other = vector("bias", 128), vector("norm", 64)
    after = dataclasses.replace(before, **{field: CHANGES[field]})
    assert plan_domain([before, other], dp=2).digest() != plan_domain([after, other], dp=2).digest()


def test_digest_sees_shape_and_stacking_at_equal_size() -> None:
    digests = {
        plan_domain(
            [PlanParam(name="w", numel=4096, child="muon", **facts)], dp=2, **sizes
        ).digest()
        for facts in (
            {"matrix": (64, 64)},
            {"matrix": (32, 128)},
            {"matrix": (128, 32)},
            {"matrix": (32, 64), "count": 2},
        )
        for sizes in ({}, {"domain": "expert"}, {"alignment": 32}, {"cost": lambda r, c: r + c})
    }
    assert len(digests) == 16


def test_every_field_of_a_parameter_is_in_its_values() -> None:
    param = vector("a", 1)
    expected = [value for _, value in sorted(dataclasses.asdict(param).items())]
    assert sorted(map(repr, param.values())) == sorted(map(repr, expected))
    assert len(param.values()) == len(dataclasses.fields(param))


def test_facts_name_the_parameter_that_differs() -> None:
    params = model()
    changed = [
        dataclasses.replace(p, group="x") if p.name == "layers.3.bias" else p for p in params
    ]
    before, after = (plan_domain(each, dp=2).facts() for each in (params, changed))
    different = [a for b, a in zip(before, after, strict=True) if a != b]
    assert any("layers.3.bias" in line for line in different)


REFUSED: list[tuple[str, list[PlanParam], dict[str, Any]]] = [
    ("dp=0 is below 1", [], {"dp": 0}),
    ("tp=-1 is below 1", [], {"tp": -1}),
    ("bucket_size=0 is below 1", [], {"bucket_size": 0}),
    ("alignment=0 is below 1", [], {"alignment": 0}),
    ("'w' is given twice", [vector("w", 1), vector("w", 2)], {}),
    ("'' with child 'adam'", [vector("", 1)], {}),
    ("numel=-1", [vector("w", -1)], {}),
    ("chunk=-2", [vector("w", 1, chunk=-2)], {}),
    ("count=3 matrices in numel=4", [vector("w", 4, count=3)], {}),
    ("count=0", [vector("w", 4, count=0)], {}),
    ("numel=8 local elements", [PlanParam(name="w", numel=8, child="m", matrix=(3, 3))], {}),
    ("4 x 4 over 4 tensor-parallel", [matrix("w", 4, 4, sharded=True)], {"tp": 4}),
    ("0 x 4", [PlanParam(name="w", numel=0, child="m", matrix=(0, 4))], {}),
    (
        "different children",
        [vector("v", 1), PlanParam(name="w", numel=1, child="adam", matrix=(1, 1))],
        {},
    ),
]


@pytest.mark.parametrize(("message", "params", "sizes"), REFUSED)
def test_contradictions_are_refused_by_name(
    message: str, params: list[PlanParam], sizes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_domain(params, **{"dp": 2, **sizes})
