"""From a whole model to what one rank of each stage and domain plans: sizes only, no processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.plan import PlanParam
from megatron_lw.presets import ModelParam
from megatron_lw.topology import Topology, divide_layers

EXPERT_KINDS = frozenset({"expert_matrix", "expert_vector"})
MATRIX_KINDS = frozenset({"matrix", "conv", "expert_matrix"})
_NUM_DIMS = MappingProxyType({"expert_matrix": 2, "expert_vector": 1})


def split_model(
    model: Iterable[ModelParam], topology: Topology
) -> list[dict[str, list[PlanParam]]]:
    """Return for each pipeline stage the parameters of each of its domains, as one rank has them.

    Layers are divided over the stages as evenly as possible, earlier stages first; embeddings go to
    the first stage, a tied one also to the last, everything else outside layers to the last.

    Raises:
        ConfigError: If a size does not divide a parameter, the experts or the layers; names it.
    """
    model = list(model)
    stages = divide_layers((param.layer for param in model if param.layer is not None), topology.pp)
    kept = _experts_of_one_rank(model, topology.ep)
    split: list[dict[str, list[PlanParam]]] = [defaultdict(list) for _ in range(topology.pp)]
    for param in model:
        if param.expert is not None and param.expert not in kept:
            continue
        domain = "expert" if param.kind in EXPERT_KINDS else "dense"
        for stage in _stages_of(param, stages, topology.pp):
            split[stage][domain].append(_plan_param(param, topology))
    return [dict(each) for each in split]


def _stages_of(param: ModelParam, stages: Mapping[int, int], pp: int) -> list[int]:
    if param.layer is not None:
        return [stages[param.layer]]
    if param.kind == "embedding":
        return [0] if param.tied is None or pp == 1 else [0, pp - 1]
    return [pp - 1]


def _experts_of_one_rank(model: Sequence[ModelParam], ep: int) -> frozenset[int]:
    """Return the numbers of the experts of the first rank; every rank has as many."""
    experts = sorted({param.expert for param in model if param.expert is not None})
    has_experts = any(param.kind in EXPERT_KINDS for param in model)
    if ep > 1 and not has_experts:
        raise ConfigError(f"ep={ep} for a model without experts: leave it at 1")
    if len(experts) % ep:
        raise ConfigError(f"ep={ep} does not divide the model's {len(experts)} experts")
    for param in model:
        is_single = param.kind in EXPERT_KINDS and not _is_stack(param)
        if ep > 1 and is_single and param.expert is None:
            raise ConfigError(
                f"parameter {param.name!r}: ep={ep} needs to know its expert: name it with "
                "'experts.N.' or '.weightN' or '.biasN', or stack the experts in dimension 0"
            )
    return frozenset(experts[: len(experts) // ep])


def _plan_param(param: ModelParam, topology: Topology) -> PlanParam:
    """Return a parameter as a rank has it."""
    is_expert = param.kind in EXPERT_KINDS
    count, shape = _unstack(param, topology.ep)
    parts = topology.sizes_of("expert" if is_expert else "dense")[1] if param.sharded else 1
    if parts > 1 and all(size % parts for size in shape):
        label = "etp" if is_expert else "tp"
        raise ConfigError(
            f"parameter {param.name!r} of shape {param.shape} has no dimension that "
            f"{label}={parts} divides: change the size, or mark it sharded=false"
        )
    is_matrix = param.kind in MATRIX_KINDS
    return PlanParam(
        name=param.name,
        numel=count * math.prod(shape) // parts,
        child="muon" if is_matrix else "adam",
        matrix=(shape[0], math.prod(shape[1:])) if is_matrix else None,
        count=count if is_matrix else 1,
        tied=param.tied,
        sharded=param.sharded,
        group="no_decay" if param.kind in ("vector", "expert_vector") else "decay",
    )


def _is_stack(param: ModelParam) -> bool:
    """Return whether dimension 0 of a parameter counts experts."""
    return param.kind in EXPERT_KINDS and len(param.shape) > _NUM_DIMS[param.kind]


def _unstack(param: ModelParam, ep: int) -> tuple[int, tuple[int, ...]]:
    """Return how many of what shape a parameter holds on one rank."""
    if not _is_stack(param):
        return 1, param.shape
    if param.shape[0] % ep:
        raise ConfigError(f"ep={ep} does not divide the {param.shape[0]} experts of {param.name!r}")
    return param.shape[0] // ep, param.shape[1:]
