"""Reports of section F about resuming: masters after a load, nested children, odd states.

Class *bitwise*. Over every layout: `tests/distributed/test_checkpoint.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw.dist_checkpointing import load, save
from tests.distributed.cases import integer_grads
from tests.harness import run_ranks
from tests.regressions.given import (
    CONFIG,
    MUON,
    Built,
    Tensors,
    backward,
    build,
    everything,
    same,
    weights,
)

SHAPES = {"a_weight": (24, 16), "b_weight": (16, 40), "c_bias": (70,), "d_bias": (5,)}


def made(fill: float, config: dict[str, Any], dtype: torch.dtype, overlap: bool) -> Built:
    return build(
        {name: torch.full(shape, fill, dtype=dtype) for name, shape in SHAPES.items()},
        config={**config, "bf16": dtype == torch.bfloat16},
        ddp_config={"overlap_param_gather": overlap, "bucket_size": 300},
    )


def train(built: Built, steps: range) -> None:
    for step in steps:
        backward(built, integer_grads(SHAPES, built[0].groups.dp.rank, step))
        built[1].step()


def load_into_garbage(root: Path, overlap: bool) -> list[tuple[bool, bool, bool]]:
    """Every rank has other garbage; is everything right before a forward, and after a step?"""
    found = []
    for number, (config, dtype) in enumerate(
        (c, d) for c in (CONFIG, MUON) for d in (torch.float32, torch.bfloat16)
    ):
        built = made(1.0, config, dtype, overlap)
        train(built, range(2))
        save(root / str(number), *built, step=2)
        other = made(-3.0, config, dtype, overlap)
        garbage = float(10 + other[0].groups.dp.rank)
        with torch.no_grad():
            for param in other[0].module.parameters():
                param.fill_(garbage)
        load(root / str(number), *other)
        loaded = {name: p.detach().clone() for name, p in other[0].module.named_parameters()}
        saved = weights(built)
        at_once = all(torch.equal(loaded[name], saved[name]) for name in SHAPES)
        whole = same(everything(built), everything(other))
        for each in (built, other):
            train(each, range(2, 3))
        found.append((at_once, whole, same(everything(built), everything(other))))
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_f2_a_load_reaches_what_other_ranks_own(tmp_path: Path, ranks: int, overlap: bool) -> None:
    """NVIDIA/Megatron-LM#6920: the sync after a load ran over an empty list."""
    for found in run_ranks(load_into_garbage, ranks, tmp_path, overlap):
        assert found == [(True, True, True)] * 4


def nested(root: Path, steps: int) -> tuple[bool, bool, int]:
    """Muon, Adam and experts of both, saved after some steps, also after none."""
    sizes = {"expert": 2}
    rank = megatron_lw.ParallelGroups.create(**sizes).ep.rank
    shapes = {"a_weight": (16, 24), "a_bias": (9,)}
    shapes |= {f"e{rank}_weight": (24, 16), f"e{rank}_bias": (24,)}
    tags = {name: {"expert": True} for name in shapes if name[0] == "e"}
    built, other = (
        build({n: torch.full(s, fill) for n, s in shapes.items()}, config=MUON, tags=tags, **sizes)
        for fill in (1.0, -5.0)
    )
    for step in range(steps):
        backward(built, integer_grads(shapes, rank, step))
        built[1].step()
    save(root, *built, step=steps)
    load(root, *other)
    equal = same(everything(built), everything(other))
    for each in (built, other):
        backward(each, integer_grads(shapes, rank, steps))
        each[1].step()
    return equal, same(everything(built), everything(other)), len(built[1].runtime.children)


@pytest.mark.parametrize("steps", [0, 1])
def test_f8_several_optimizers_save_before_and_after_the_first_step(
    tmp_path: Path, steps: int
) -> None:
    """NVIDIA/Megatron-LM#5684, #6073, #7354: chained or nested optimizers could not be saved."""
    for loaded, later, children in run_ranks(nested, 2, tmp_path, steps):
        assert loaded and later and children >= 2


class Odd(torch.optim.Optimizer):
    """State of every kind that optimizers keep."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(
                        count=0,
                        ratio=0.5,
                        step=torch.zeros((), dtype=torch.float64),
                        nothing=None,
                        mode="first",
                        done=False,
                        momentum=torch.zeros_like(param),
                        parts=[torch.zeros(3), None, 7],
                    )
                state["count"] += 1
                state["ratio"] /= 3
                state["step"] += 1
                state["mode"] = f"after {state['count']}"
                state["done"] = state["count"] > 1
                state["parts"][0] += 1
                state["momentum"].lerp_(param.grad, 0.5)
                param.sub_(state["momentum"] * state["step"], alpha=group["lr"])


def odd_states(root: Path, loaded: bool) -> tuple[dict[str, dict[str, Any]], Tensors]:
    shapes = {"a_weight": (24, 16), "b_weight": (16, 40), "c_weight": (6, 5)}
    config = {**CONFIG, "optimizer": "whole", "whole_optimizer": f"{__name__}:Odd"}
    fill = -2.0 if loaded else 1.0
    built = build({n: torch.full(s, fill) for n, s in shapes.items()}, config=config)
    if loaded:
        load(root, *built)
    else:
        for step in range(2):
            backward(built, integer_grads(shapes, 0, step))
            built[1].step()
        save(root, *built, step=2)
    kept = {}
    for child in built[1].runtime.children:
        for name, values in child.owned_values().items():
            kept.setdefault(name, {}).update(values)
        for state in child.owned_states():
            kept.setdefault(state.param, {})[state.key] = state.tensor.clone()
    backward(built, integer_grads(shapes, 0, 2))
    built[1].step()
    return kept, weights(built)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_f17_numbers_texts_none_and_tensors_of_no_dimension_keep_their_types(
    tmp_path: Path, ranks: int
) -> None:
    """NVIDIA/Megatron-LM#2874, #3537, !2682, #2576: a step, a None, a flag taken for a tensor."""
    before = run_ranks(odd_states, 2, tmp_path, False)
    after = run_ranks(odd_states, ranks, tmp_path, True)
    want = {name: state for kept, _ in before for name, state in kept.items()}
    got = {name: state for kept, _ in after for name, state in kept.items()}
    assert want.keys() == got.keys() == {"a_weight", "b_weight", "c_weight"}
    for name, state in want.items():
        assert {type(value) for value in state.values()} >= {int, float, str, bool, type(None)}
        assert state.keys() == got[name].keys()
        for key, value in state.items():
            other = got[name][key]
            assert type(other) is type(value), (name, key)
            if isinstance(value, torch.Tensor):
                assert other.dtype == value.dtype and torch.equal(other, value), (name, key)
            else:
                assert other == value, (name, key)
    for _, weight in after:
        assert all(torch.equal(weight[name], before[0][1][name]) for name in want)
