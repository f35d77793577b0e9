"""Random models and layouts of ranks for checkpoints: value = global element index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.distributed.checkpoint_cases import Logical, Table

LAYOUTS: tuple[tuple[int, dict[str, int]], ...] = (
    (1, {}),
    (2, {}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (2, {"expert": 2}),
    (3, {}),
    (4, {}),
    (4, {"tensor": 2}),
    (4, {"tensor": 4, "expert_tensor": 1, "expert": 2}),
    (4, {"expert": 4}),
    (4, {"pipeline": 2, "tensor": 2}),
    (4, {"pipeline": 2, "expert": 2}),
    (4, {"expert": 2, "expert_tensor": 2}),
)
KINDS = (
    "matrix", "fused", "vector", "scalar", "empty", "conv", "vocabulary", "tied", "frozen",
    "frozen vocabulary", "expert", "stack", "fp32",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One side of an example: how the model is laid out there.

    Attributes:
        ranks: world size.
        sizes: keywords of `ParallelGroups.create`.
        options: further keywords of `Layout`.
    """

    ranks: int
    sizes: dict[str, int]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model, the layout that saves it and the one that loads it."""

    table: Table
    optimizer: str
    saved: Half
    loaded: Half
    weights_only: bool
    background: bool


@st.composite
def _logical(draw: st.DrawFn, kind: str) -> Logical:
    """One parameter; what may be divided has four parts or a multiple of them."""
    stage = draw(st.sampled_from([0, 1]))
    side = st.sampled_from([1, 3, 4, 7, 12])
    four = st.sampled_from([4, 8, 20])
    tp_dim = draw(st.sampled_from([None, 0, 1]))
    if kind in ("matrix", "conv", "frozen"):
        shape = [draw(side), draw(side), *([2, 3] if kind == "conv" else [])]
        if tp_dim is not None:
            shape[tp_dim] = draw(four)
        shape[1] += kind == "conv" and shape[1] == 1
        frozen = kind == "frozen"
        if tp_dim == 1 and kind == "conv":
            shape[1] = 4
        return Logical(tuple(shape), tp_dim=tp_dim, stage=stage, frozen=frozen)
    if kind == "fused":
        blocks = tuple(draw(st.lists(four, min_size=2, max_size=3)))
        return Logical((sum(blocks), draw(side)), tp_dim=0, blocks=blocks, stage=stage)
    if kind in ("vocabulary", "tied", "frozen vocabulary"):
        rows = draw(st.integers(1, 40))
        return Logical(
            (rows, draw(side)),
            tp_dim=0,
            vocabulary=True,
            stage=None if kind == "tied" else stage,
            frozen=kind == "frozen vocabulary",
        )
    if kind == "expert":
        shape = (draw(four), draw(side))
        return Logical(shape, tp_dim=0, expert=draw(st.integers(0, 3)), stage=stage)
    if kind == "stack":
        return Logical((4, draw(four), draw(side)), tp_dim=1, stack=True, stage=stage)
    if kind == "fp32":
        return Logical((draw(side),), keep_fp32=True, stage=stage)
    shape = {"vector": (draw(st.integers(1, 150)),), "scalar": (), "empty": (0, 3)}[kind]
    return Logical(shape, stage=stage)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Up to ten parameters, at least one of them trainable, at most one of them tied."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=10))
    kinds = [k for i, k in enumerate(kinds) if k != "tied" or "tied" not in kinds[:i]]
    if all(kind.startswith("frozen") or kind == "empty" for kind in kinds):
        kinds.append("vector")
    return {f"layers.{i}.{k.replace(' ', '_')}": draw(_logical(k)) for i, k in enumerate(kinds)}


@st.composite
def _halves(draw: st.DrawFn) -> Half:
    ranks, sizes = draw(st.sampled_from(LAYOUTS))
    options = {
        "bucket_size": draw(st.sampled_from([1, 100, 300, 100_000])),
        "reverse": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
    }
    return Half(ranks=ranks, sizes=sizes, options=options)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """One example."""
    table = draw(tables())
    matrices = [s for n, s in table.items() if n.endswith(("matrix", "fused", "conv"))]
    optimizers = ["adam", "lion", "sgd", *(["muon"] * 3 if matrices else [])]
    return Example(
        table=table,
        optimizer=draw(st.sampled_from(optimizers)),
        saved=draw(_halves()),
        loaded=draw(_halves()),
        weights_only=draw(st.sampled_from([False, False, False, True])),
        background=draw(st.booleans()),
    )
