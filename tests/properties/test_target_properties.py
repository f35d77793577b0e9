"""Plans of other layouts, from records alone: every element written once, every row tiled."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing.manifest import (
    MASTER,
    ChildRecord,
    Manifest,
    ParamRecord,
    RowRecord,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.target import TargetPlan
from megatron_lw.dist_checkpointing.tiling import tiling_problem
from megatron_lw.optimizer.boxes import Box
from megatron_lw.topology import Topology

STATES = {"adam": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}


def param(name: str, shape: tuple[int, ...], child: str, **facts: Any) -> ParamRecord:
    plain: dict[str, Any] = {
        "names": (name,),
        "dtype": "bfloat16",
        "stored_rows": shape[0] if shape else None,
        "group": child,
        "domain": "dense",
        "tp_dim": None,
        "blocks": None,
        "split_blocks": True,
        "qkv": None,
        "matrices": 1,
        "is_stack": False,
        "role": "matrix" if len(shape) > 1 else "vector",
    }
    return ParamRecord(name=name, shape=shape, child=child, **{**plain, **facts})


@st.composite
def models(draw: st.DrawFn) -> tuple[ParamRecord, ...]:
    """Two to four layers of every kind of parameter; sizes that 4 divides where they are cut."""
    wide, narrow = draw(st.integers(1, 5)) * 8, draw(st.integers(1, 9))
    words = draw(st.integers(2, 60))
    rows = -(-words // 16) * 16
    found = [
        param(
            "tied/words",
            (words, narrow),
            "adam",
            names=("embedding", "output"),
            stored_rows=rows,
            tp_dim=0,
            role="embedding",
        )
    ]
    for layer in range(draw(st.integers(2, 4))):
        at = f"layers.{layer}"
        found += [
            param(f"{at}.up", (wide, narrow), "muon", tp_dim=0, blocks=(wide // 2, wide // 2)),
            param(f"{at}.down", (narrow, wide), "muon", tp_dim=1),
            param(f"{at}.router", (4, narrow), "muon"),
            param(f"{at}.norm", (narrow,), "adam"),
            param(f"{at}.scale", (), "adam", domain="replicated", dtype="float32"),
            param(
                f"{at}.stack",
                (4, wide, narrow),
                "muon",
                tp_dim=1,
                domain="expert",
                matrices=4,
                is_stack=True,
            ),
            *(
                param(f"{at}.experts.{e}.w", (wide, narrow), "muon", tp_dim=0, domain="expert")
                for e in range(4)
            ),
        ]
    return tuple(found)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tp, etp, ep = (draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    dp = math.lcm(tp, ep * etp) // tp * draw(st.integers(1, 4))
    dp = draw(st.sampled_from((dp, 64)))
    return Topology(dp=dp, tp=tp, ep=ep, pp=draw(st.integers(1, 2)), etp=etp)


def manifest(params: tuple[ParamRecord, ...]) -> Manifest:
    return Manifest(
        step=1,
        topology={},
        params=params,
        tensors=tuple(
            TensorRecord(name=p.name, state=state, dtype="float32", shape=p.shape, pieces=())
            for p in params
            for state in (MASTER, *STATES[p.child])
        ),
        rows=(),
        files=(),
        children={
            name: ChildRecord(num_steps=1, state_keys=keys, backend=None, values={})
            for name, keys in STATES.items()
        },
        groups={"adam": {}, "muon": {}},
        values={},
        values_by_rank=(),
    )


def row_problem(row: RowRecord) -> str | None:
    spans = sorted([*((r.start, r.start + r.numel) for r in row.runs), *row.padding])
    edges = [0, *(edge for span in spans for edge in span), row.length]
    if all(a == b for a, b in zip(edges[::2], edges[1::2], strict=True)):
        return None
    return f"{row.bucket} of rank {row.rank}: {spans} in {row.length}"


@given(models(), topologies(), st.sampled_from((None, 1, 200)))
@settings(max_examples=15, deadline=None)
def test_ranks_write_every_element_once_and_rows_are_tiled(
    params: tuple[ParamRecord, ...], topology: Topology, bucket_size: int | None
) -> None:
    source = manifest(params)
    plan = TargetPlan(source, topology, bucket_size=bucket_size, vocab_multiple=1)
    boxes: dict[str, list[Box]] = {record.key: [] for record in source.tensors}
    rows: list[RowRecord] = []
    for rank in range(topology.world):
        target = plan.rank(rank)
        rows += target.rows
        for wanted in target.wanted:
            boxes[wanted.record.key].append(wanted.box)
    for record in source.tensors:
        assert tiling_problem(record.shape, boxes[record.key]) is None, record.key
    assert [problem for row in rows if (problem := row_problem(row))] == []
    held = {run.name for row in rows for run in row.runs}
    assert held == {p.name for p in params}
