"""Every member that Megatron's loop and schedules call, checked one by one on two ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.megatron import launch, needs

needs.megatron()

SURFACE = Path(__file__).parents[2] / "megatron_lw/integrations/megatron/surface.py"


def protocol_members() -> list[str]:
    """Every member of the three protocols, read from the source: importing it imports Megatron."""
    kinds = {"OptimizerSurface": "optimizer", "ChunkSurface": "chunk", "ParamSurface": "param"}
    members = []
    for each in ast.parse(SURFACE.read_text()).body:
        if isinstance(each, ast.ClassDef):
            for node in each.body:
                if isinstance(node, ast.FunctionDef):
                    members.append(f"{kinds[each.name]}.{node.name}")
                elif isinstance(node, ast.AnnAssign):
                    members.append(f"{kinds[each.name]}.{ast.unparse(node.target)}")
    return members


@pytest.fixture(scope="module")
def checked() -> list[dict[str, str]]:
    return launch.on_ranks(2, "surface_cases", "check_all")


@pytest.mark.parametrize("member", protocol_members())
def test_member(checked: list[dict[str, str]], member: str) -> None:
    assert [found[member] for found in checked] == ["", ""]


def test_every_check_is_of_a_member(checked: list[dict[str, str]]) -> None:
    assert sorted(checked[0]) == sorted(protocol_members())
    assert len(checked[0]) > 40


def test_nothing_of_megatrons_class_is_inherited() -> None:
    [inherited] = launch.on_ranks(1, "surface_cases", "inherited_from_megatron")
    assert inherited == []
