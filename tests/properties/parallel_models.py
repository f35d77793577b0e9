"""What a case of the parallel properties is: model, topology, settings and interleaving.

Records only. A case may have two phases: the second goes on, from a checkpoint, in another
topology, maybe on another number of ranks. `parallel_strategies` draws them, `parallel_shares` says
which part and gradient each rank has, `parallel_ranks` trains on one rank, `parallel_held` says
what it must hold, and `parallel_checks` compares with one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

MAX_PARAMS = 12
LR = 0.02
HUGE = 2.0**40
THRESHOLD = 1e9

Sizes = dict[str, int]

TOPOLOGIES: dict[str, tuple[int, Sizes]] = {
    "D1": (1, {}),
    "D2": (2, {}),
    "C2": (2, {"context": 2}),
    "T2": (2, {"tensor": 2}),
    "E2": (2, {"expert": 2}),
    "P2": (2, {"pipeline": 2}),
    "T2E2ET1": (2, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "T2ET1": (2, {"tensor": 2, "expert_tensor": 1}),
    "E1ET2": (2, {"expert_tensor": 2}),
    "D3": (3, {}),
    "T3": (3, {"tensor": 3}),
    "E3": (3, {"expert": 3}),
    "P3": (3, {"pipeline": 3}),
    "D4": (4, {}),
    "D2C2": (4, {"context": 2}),
    "D4E2": (4, {"expert": 2}),
    "D4E4": (4, {"expert": 4}),
    "D4E2ET2": (4, {"expert": 2, "expert_tensor": 2}),
    "D2T2": (4, {"tensor": 2}),
    "D2T2E2ET1": (4, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "D2T2E2ET2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "T4E4ET1": (4, {"tensor": 4, "expert": 4, "expert_tensor": 1}),
    "T4E2ET2": (4, {"tensor": 4, "expert": 2, "expert_tensor": 2}),
    "P2D2": (4, {"pipeline": 2}),
    "P2T2E2ET1": (4, {"pipeline": 2, "tensor": 2, "expert": 2, "expert_tensor": 1}),
}
KINDS = (
    "matrix",
    "fused",
    "opt_out",
    "vector",
    "scalar",
    "empty",
    "sequence_parallel",
    "conv",
    "depthwise",
    "stack",
    "expert",
    "expert_vector",
    "expert_stack",
    "embedding",
    "table",
    "padded",
    "tied",
    "frozen",
    "fp32",
    "quantised",
)
OPERATIONS = (
    "evaluate",
    "start_sync",
    "sync",
    "finish_sync",
    "zero_grad",
    "change_lr",
    "change_decay",
    "check",
    "save",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One logical parameter, whole.

    Attributes:
        name: global name.
        kind: one of `KINDS`.
        shape: of the whole, over all tensor- and expert-parallel ranks.
        dtype: name of the weight's dtype.
        tp_dim: dimension divided over (expert) tensor parallelism.
        blocks: fused matrices along dimension 0, each divided by itself.
        matrices: matrices stacked in the whole.
        expert: the expert-parallel rank that has it; -1: a stack divided over all of them.
        stages: pipeline stages that have it.
        chunk: model chunk.
        use: how forward reaches it: "own" module, "loose", "borrowed", or "twice".
        lr: learning rate, where an override gives one.
        recipe: name of the FP8 recipe, where the weight is quantised.
        tags: further tags.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tp_dim: int | None = None
    blocks: tuple[int, ...] | None = None
    matrices: int = 1
    expert: int | None = None
    stages: tuple[int, ...] = (0,)
    chunk: int = 0
    use: str = "own"
    lr: float | None = None
    recipe: str | None = None
    tags: tuple[tuple[str, Any], ...] = ()

    @property
    def tag(self) -> dict[str, Any]:
        """The further tags as keywords of `annotate`."""
        return dict(self.tags)

    @property
    def trainable(self) -> bool:
        """Whether it has a gradient at all."""
        return self.kind != "frozen"

    def matrix(self, optimizer: str) -> tuple[int, int] | None:
        """(rows, columns) of one of its matrices, if Muon steps it."""
        elementwise = self.kind in ("embedding", "table", "padded", "opt_out", "frozen", "empty")
        if optimizer != "muon" or elementwise or self.tag.get("embedding") or len(self.shape) < 2:
            return None
        if self.kind == "depthwise":
            return None
        if "stack" in self.kind:
            cols = self.shape[-1]
            return prod(self.shape) // cols // self.matrices, cols
        return self.shape[0], prod(self.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step and what happens around it.

    Attributes:
        micro_batches: backwards that are accumulated; all but the last under `no_sync`.
        kind: "plain", "nonfinite", "huge" (above the threshold), "empty" (no backward), "fail" (one
            rank has a wrong setting), or "break" (one rank fails half-way; a checkpoint is loaded).
        absent: how many of ten gradients do not come.
        finalize: "step" leaves it to the step, "hook" calls it, "tokens" divides by tokens.
        operations: in between: before zero_grad, after it, after backward, after the step.
        poison: which element of what is not finite, or which rank fails.
    """

    micro_batches: int = 1
    kind: str = "plain"
    absent: int = 0
    finalize: str = "step"
    operations: tuple[tuple[str, ...], ...] = ((), (), (), ())
    poison: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One example.

    Attributes:
        ranks: world size.
        sizes: keywords of `ParallelGroups.create`.
        specs: the parameters.
        steps: what is done.
        config: keywords of `OptimizerConfig`.
        ddp_config: keywords of `DDPConfig`.
        exact: integer gradients, clip off; else real ones.
        garbage: whether replicas start with other values than the first.
        late: whether overlapped gathers arrive no sooner than somebody waits for them.
        background: whether checkpoints are written beside training.
        later: the topology of the second phase; None: there is none.
        later_ddp_config: keywords of `DDPConfig` there.
        cut: the first step of the second phase.
        seed: of values and gradients.
    """

    ranks: int
    sizes: Sizes
    specs: tuple[Spec, ...]
    steps: tuple[Step, ...]
    config: dict[str, Any]
    ddp_config: dict[str, Any]
    exact: bool
    garbage: bool
    late: bool
    background: bool
    later: str | None
    later_ddp_config: dict[str, Any]
    cut: int
    seed: int

    @property
    def axes(self) -> Sizes:
        """Sizes of the axes of the topology, data parallelism included."""
        return axes_of(self.ranks, self.sizes)

    @property
    def phases(self) -> list[tuple[Case, range]]:
        """The case as each topology has it, with the numbers of the steps there."""
        if self.later is None:
            return [(self, range(len(self.steps)))]
        ranks, sizes = TOPOLOGIES[self.later]
        axes = axes_of(ranks, sizes)
        specs = tuple(
            replace(
                spec,
                stages=tuple(dict.fromkeys(stage % axes["pp"] for stage in spec.stages))
                if spec.kind != "tied"
                else tuple(dict.fromkeys((0, axes["pp"] - 1))),
                expert=spec.expert if spec.expert in (None, -1) else spec.expert % axes["ep"],
            )
            for spec in self.specs
        )
        second = replace(
            self, ranks=ranks, sizes=sizes, specs=specs, ddp_config=self.later_ddp_config
        )
        return [(self, range(self.cut)), (second, range(self.cut, len(self.steps)))]


def axes_of(ranks: int, sizes: Sizes) -> Sizes:
    """Sizes of the axes of a topology, data parallelism included."""
    tp, pp = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    etp, ep = sizes.get("expert_tensor", tp), sizes.get("expert", 1)
    stage = ranks // pp
    return {"tp": tp, "pp": pp, "dp": stage // tp, "etp": etp, "ep": ep} | {
        "edp": stage // etp // ep
    }
