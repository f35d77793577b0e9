"""Random cases: models of up to twelve parameters, interleavings, settings."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from hypothesis import strategies as st

from tests.distributed.fp8_cases import RECIPES
from tests.properties.parallel_models import (
    KINDS,
    LR,
    MAX_PARAMS,
    OPERATIONS,
    THRESHOLD,
    TOPOLOGIES,
    Case,
    Sizes,
    Spec,
    Step,
    axes_of,
)


@st.composite
def _shapes(draw: st.DrawFn, dims: int, tp: int, divisible: tuple[int, ...]) -> Any:
    """A small shape and a dimension among `divisible`, or None, that divides by `tp`."""
    sides = {1: (1, 3, 7, 33, 70), 2: (1, 2, 5, 8, 17), 3: (2, 3, 5), 4: (2, 3), 5: (2,)}[dims]
    shape = [draw(st.sampled_from(sides)) for _ in range(dims)]
    tp_dim = draw(st.sampled_from([None, *divisible]))
    if tp_dim is not None:
        shape[tp_dim] *= tp
    return tuple(shape), tp_dim


def _matrix(draw: st.DrawFn, tp: int, kind: str) -> dict[str, Any]:
    if kind == "fused":
        parts = draw(st.lists(st.sampled_from([1, 2, 6]), min_size=2, max_size=3))
        blocks = tuple(tp * part for part in parts)
        shape = (sum(blocks), draw(st.sampled_from([3, 8])))
        return {"shape": shape, "blocks": blocks, "tp_dim": draw(st.sampled_from([None, 0]))}
    shape, tp_dim = draw(_shapes(2, tp, (0, 1)))
    tags = (("use_muon", False),) if kind == "opt_out" else ()
    return {"shape": shape, "tp_dim": tp_dim, "tags": tags}


def _quantised(draw: st.DrawFn, tp: int, recipes: tuple[str, ...]) -> dict[str, Any]:
    """A BF16 matrix in FP8; the sides of each shard are those that its format takes."""
    recipe = draw(st.sampled_from(recipes))
    sides = (32, 64, 96) if RECIPES[recipe].scales_are_codes else (8, 33, 96, 160)
    shape = [draw(st.sampled_from(sides)) for _ in range(2)]
    tp_dim = draw(st.sampled_from([None, 0, 1]))
    if tp_dim is not None:
        shape[tp_dim] *= tp
    return {"shape": tuple(shape), "tp_dim": tp_dim, "dtype": "bfloat16", "recipe": recipe}


def _vector(draw: st.DrawFn, tp: int, kind: str) -> dict[str, Any]:
    if kind in ("scalar", "empty"):
        return {"shape": () if kind == "scalar" else (0,)}
    shape, tp_dim = draw(_shapes(1, tp, (0,)))
    return {"shape": shape, "tp_dim": tp_dim}


def _replica(draw: st.DrawFn, tp: int, kind: str) -> dict[str, Any]:
    shape, _ = draw(_shapes(draw(st.sampled_from([1, 2])), tp, ()))
    if kind == "fp32":
        return {"shape": shape, "dtype": "float32", "tags": (("keep_fp32", True),)}
    return {"shape": shape, "tags": (("sequence_parallel", True),)}


def _conv(draw: st.DrawFn, tp: int, kind: str) -> dict[str, Any]:
    if kind == "depthwise":
        return {"shape": (draw(st.sampled_from([2, 7])), 1, 3)}
    shape, tp_dim = draw(_shapes(draw(st.sampled_from([3, 4, 5])), tp, (0, 1)))
    return {"shape": shape, "tp_dim": tp_dim}


def _stack(draw: st.DrawFn, tp: int, parts: int) -> dict[str, Any]:
    """A stack of matrices, `[N, rows, cols]` or `[N * rows, cols]`, N a multiple of `parts`."""
    (rows, cols), tp_dim = draw(_shapes(2, tp, (0, 1)))
    matrices = parts * draw(st.sampled_from([2, 3]))
    flat = draw(st.booleans())
    if flat and tp_dim == 0:
        tp_dim = None
    if flat:
        return {"shape": (matrices * rows, cols), "tp_dim": tp_dim, "matrices": matrices}
    tp_dim = None if tp_dim is None else tp_dim + 1
    return {"shape": (matrices, rows, cols), "tp_dim": tp_dim, "matrices": matrices}


def _table(draw: st.DrawFn, tp: int, kind: str, pp: int) -> dict[str, Any]:
    """Embeddings: tagged, of `nn.Embedding`, with padding rows, or tied over the stages."""
    shape, tp_dim = draw(_shapes(2, tp, (0,)))
    found: dict[str, Any] = {"shape": shape, "tp_dim": tp_dim}
    tag = draw(st.sampled_from(["embedding", "output"]))
    if kind == "embedding":
        found["tags"] = ((tag, True),)
    if kind == "padded":
        rows = shape[0] - draw(st.integers(0, shape[0] - 1))
        found["tags"] = (("embedding", True), ("logical_rows", rows))
    if kind == "tied":
        elementwise = draw(st.booleans())
        found["tags"] = (("tied", "words"), ("embedding", elementwise))
        found["stages"] = tuple(dict.fromkeys((0, pp - 1)))
    return found


def _of_kind(
    draw: st.DrawFn, kind: str, axes: Sizes, common: Sizes, recipes: tuple[str, ...]
) -> dict[str, Any]:
    """A parameter that `axes` holds, and whose sides `common` divides."""
    tp, etp, ep = common["tp"], common["etp"], common["ep"]
    expert = draw(st.integers(0, axes["ep"] - 1)) if kind.startswith("expert") else None
    if kind == "quantised":
        return _quantised(draw, tp, recipes)
    if kind in ("matrix", "fused", "opt_out", "frozen"):
        return _matrix(draw, tp, kind)
    if kind in ("vector", "scalar", "empty"):
        return _vector(draw, tp, kind)
    if kind in ("fp32", "sequence_parallel"):
        return _replica(draw, tp, kind)
    if kind in ("conv", "depthwise"):
        return _conv(draw, tp, kind)
    if kind == "stack":
        return _stack(draw, tp, 1)
    if kind == "expert_stack":
        return {**_stack(draw, etp, ep), "expert": -1}
    if kind == "expert":
        return {**_matrix(draw, etp, "matrix"), "expert": expert}
    if kind == "expert_vector":
        return {**_vector(draw, etp, "vector"), "expert": expert}
    return _table(draw, tp, kind, axes["pp"])


@st.composite
def models(
    draw: st.DrawFn, axes: Sizes, common: Sizes, recipes: tuple[str, ...]
) -> tuple[Spec, ...]:
    """Up to twelve parameters, at least one of them trainable; at most one tied."""
    fewest = draw(st.sampled_from([1, 5, 9]))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=fewest, max_size=MAX_PARAMS))
    chunks = draw(st.sampled_from([1, 1, 2]))
    dtypes = draw(st.sampled_from([("float32",), ("bfloat16",), ("float32", "bfloat16")]))
    specs = []
    for number, kind in enumerate(kinds):
        kind = "vector" if kind == "tied" and "tied" in kinds[:number] else kind
        found = {
            "dtype": draw(st.sampled_from(dtypes)),
            "stages": (draw(st.integers(0, axes["pp"] - 1)),),
            "chunk": draw(st.integers(0, chunks - 1)),
            "use": draw(st.sampled_from(["own", "loose", "borrowed", "twice"])),
            "lr": draw(st.sampled_from([None, None, None, LR / 2])),
            **_of_kind(draw, kind, axes, common, recipes),
        }
        specs.append(Spec(name=f"p{number}", kind=kind, **found))
    if not any(spec.trainable for spec in specs):
        specs[0] = replace(specs[0], kind="opt_out")
    return tuple(specs)


@st.composite
def _operations(draw: st.DrawFn, *, after_backward: bool) -> tuple[str, ...]:
    """At most two; gradients that are there are not thrown away, and a check is between steps."""
    unfit = ("zero_grad", "check") if after_backward else ()
    usual = [name for name in OPERATIONS if name not in unfit]
    return tuple(draw(st.lists(st.sampled_from(usual), max_size=2))) if draw(st.booleans()) else ()


@st.composite
def _steps(draw: st.DrawFn, plain_only: bool) -> Step:
    kinds = ["plain"] * 4 + ["nonfinite", "huge", "empty", "fail", "break"]
    return Step(
        micro_batches=draw(st.sampled_from([1, 1, 2, 3])),
        kind="plain" if plain_only else draw(st.sampled_from(kinds)),
        absent=draw(st.sampled_from([0, 0, 0, 3])),
        finalize=draw(st.sampled_from(["step", "step", "hook", "tokens"])),
        operations=tuple(draw(_operations(after_backward=place == 2)) for place in range(4)),
        poison=draw(st.integers(0, 1000)),
    )


def _reduce_modes(
    topologies: list[Sizes], exact: bool, steps: tuple[Step, ...]
) -> list[dict[str, bool]]:
    """How gradients may be reduced so that their sums are what is asked for.

    In BF16 small integers are exact, divided by powers of two; other numbers are not.
    """
    modes = [{}]
    powers_of_two = all(axes["dp"] * axes["tp"] in (1, 2, 4) for axes in topologies)
    if powers_of_two or not exact:
        modes.append({"average_in_collective": True})
    if exact and powers_of_two and not any(step.finalize == "tokens" for step in steps):
        modes.append({"grad_reduce_in_fp32": False})
        modes.append({**modes[-1], "reduce_scatter_with_fp32_accumulation": True})
    return modes


_FREE: dict[str, st.SearchStrategy[Any]] = {
    "bucket_size": st.sampled_from([None, 1, 60, 200, 1000, 5000]),
    "overlap_grad_reduce": st.booleans(),
    "overlap_param_gather": st.booleans(),
}
"""What may differ between the phases of a case."""


@st.composite
def cases(draw: st.DrawFn, topology: str) -> Case:
    """One example for a topology."""
    ranks, sizes = TOPOLOGIES[topology]
    blank = Case(
        ranks=ranks,
        sizes=sizes,
        specs=(),
        steps=(),
        config={},
        ddp_config={},
        exact=draw(st.sampled_from([True, True, False])),
        garbage=draw(st.booleans()),
        late=draw(st.booleans()),
        background=draw(st.booleans()),
        later=draw(st.one_of(st.none(), st.sampled_from(list(TOPOLOGIES)))),
        later_ddp_config={},
        cut=0,
        seed=draw(st.integers(0, 2**31)),
    )
    topologies = [blank.axes]
    if blank.later is not None:
        topologies.append(axes_of(*TOPOLOGIES[blank.later]))
    common = {axis: lcm(*(axes[axis] for axes in topologies)) for axis in blank.axes}
    # Histories of maxima are of the shards that there are.
    recipes = tuple(name for name in RECIPES if blank.later is None or name != "delayed")
    specs = draw(models(blank.axes, common, recipes))
    steps = tuple(draw(_steps(number == 0)) for number in range(draw(st.integers(1, 4))))
    optimizer = draw(st.sampled_from(["muon", "muon", "adam"]))
    if all(spec.matrix("muon") is None for spec in specs):
        optimizer = "adam"
    config = {
        "optimizer": optimizer,
        "lr": LR,
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "clip_grad": 0.0 if blank.exact else draw(st.sampled_from([0.0, 1.0])),
        "muon_nesterov": draw(st.booleans()),
        "muon_scale_mode": draw(st.sampled_from(["spectral", "unit_rms_norm", "shape_scaling"])),
        "muon_fp32_matmul_prec": "highest",
        "log_num_zeros_in_grad": True,
        "on_nonfinite": "skip",
        "grad_norm_skip_threshold": THRESHOLD,
        "bf16": any(spec.dtype == "bfloat16" for spec in specs),
    }
    ddp_config = {
        "fp8_param_gather": draw(st.booleans()),
        **draw(st.sampled_from(_reduce_modes(topologies, blank.exact, steps))),
    }
    later = {name: draw(values) for name, values in _FREE.items()}
    return replace(
        blank,
        specs=specs,
        steps=steps,
        config=config,
        ddp_config={**ddp_config, **{name: draw(values) for name, values in _FREE.items()}},
        later_ddp_config={**ddp_config, **later},
        cut=draw(st.integers(0, len(steps))),
    )
