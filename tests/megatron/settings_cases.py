"""What becomes of each field of Megatron's configurations; imported on ranks only."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import nn

from megatron_lw.config import OptimizerConfig as OurConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.field_status import FieldStatus
from megatron_lw.integrations.megatron import settings
from tests.megatron.runs import refusal

# A value that is not the default, for fields where adding one or a change of sign is none.
OTHER: dict[str, Any] = {
    "decoupled_min_lr": None,
    "optimizer": "muon",
    "loss_scale": 1.0,
    "muon_scale_mode": "shape_scaling",
    "muon_fp32_matmul_prec": "high",
    "muon_coefficient_type": "simple",
    "muon_tp_mode": "distributed",
    "muon_scalar_optimizer": "lion",
    "muon_momentum": 0.5,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "lr": 0.1,
    "min_lr": 0.01,
    "decoupled_lr": 0.1,
    "bucket_size": 1000,
    "num_buckets": 4,
    "grad_norm_skip_threshold": 5.0,
}


def table() -> str:
    """The tables of `docs/from-megatron.md`: every field of the installed dataclasses."""
    parts = []
    for kind, status, edge in (
        (OptimizerConfig, OurConfig.FIELD_STATUS, settings.OPTIMIZER_EDGE),
        (DistributedDataParallelConfig, DDPConfig.FIELD_STATUS, settings.DDP_EDGE),
    ):
        rows = [_row(f.name, status, edge) for f in dataclasses.fields(kind) if f.init]
        parts.append(
            "\n".join(["| field | here | what it does, or why not |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts)


def _row(name: str, table: Mapping[str, FieldStatus], edge: Mapping[str, tuple[str, str]]) -> str:
    status, reason = edge.get(name, (table[name].status, table[name].reason))
    if name not in edge and table[name].status == "refused":
        reason = f"{reason}; {table[name].remedy}"
    return f"| `{name}` | {status.replace('_', ' ')} | {reason} |"


def carried() -> dict[str, str]:
    """Honoured field -> what is wrong with how its value carries over; empty where nothing is."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(OptimizerConfig):
        if field.init and OurConfig.FIELD_STATUS[field.name].status == "honoured":
            found[f"OptimizerConfig.{field.name}"] = _optimizer_problem(field)
    for field in dataclasses.fields(DistributedDataParallelConfig):
        refused = settings.DDP_EDGE.get(field.name, ("",))[0] == "refused"
        if DDPConfig.FIELD_STATUS[field.name].status == "honoured" and not refused:
            value = _other(field)
            changed = {field.name: value}
            if field.name == "reduce_scatter_with_fp32_accumulation":
                changed["grad_reduce_in_fp32"] = False
            ours = settings.ddp_config(DistributedDataParallelConfig(**changed), num_parameters=9)
            got = getattr(ours, field.name)
            found[f"DDPConfig.{field.name}"] = "" if got == value else f"{value} became {got}"
    return found


def _optimizer_problem(field: dataclasses.Field[Any]) -> str:
    value = _other(field)
    changed = {"lr": 0.1, "muon_tp_mode": "duplicated", field.name: value}
    ours = settings.optimizer_config(OptimizerConfig(**changed), tensor_parallel=2)
    wanted = {
        "muon_tp_mode": "owner", "loss_scale": None, "overlap_param_gather": False
    }.get(field.name, value)  # fmt: skip
    got = getattr(ours, field.name)
    return "" if got == wanted else f"{value!r} became {got!r}"


def _other(field: dataclasses.Field[Any]) -> Any:
    if field.name in OTHER:
        return OTHER[field.name]
    if isinstance(field.default, bool):
        return not field.default
    return field.default + 1 if isinstance(field.default, int) else field.default


def refused() -> dict[str, str]:
    """Settings that are refused -> the message; empty where nothing was raised."""

    def optimizer(**changed: Any) -> str:
        config = OptimizerConfig(lr=0.1, **changed)
        return refusal(lambda: settings.optimizer_config(config, tensor_parallel=2))

    def ddp(**changed: Any) -> str:
        config = DistributedDataParallelConfig(**changed)
        return refusal(lambda: settings.ddp_config(config, num_parameters=9))

    return {
        "optimizer_cuda_graph": optimizer(optimizer_cuda_graph=True, muon_tp_mode="duplicated"),
        "optimizer_cpu_offload": optimizer(optimizer_cpu_offload=True, muon_tp_mode="duplicated"),
        "use_megatron_fsdp": ddp(use_megatron_fsdp=True),
        "nccl_ub": ddp(nccl_ub=True),
    }


def buckets() -> int | None:
    """`num_buckets` becomes a size."""
    config = DistributedDataParallelConfig(num_buckets=4)
    return settings.ddp_config(config, num_parameters=4000).bucket_size


def lions_rates() -> tuple[Any, ...]:
    """Rates of --optimizer lion and what is warned of, without and with a rate of Lion's own."""

    def found(**changed: Any) -> tuple[tuple[float, float], list[str]]:
        theirs = OptimizerConfig(optimizer="lion", lr=0.1, adam_beta2=0.5, **changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = settings.optimizer_config(theirs, tensor_parallel=1)
        return (ours.lion_beta1, ours.lion_beta2), [str(w.message) for w in caught]

    return found(), found(lion_beta2=0.25)


def override_names(optimizer: str, scalars: str) -> list[dict[str, Any]]:
    """What Megatron's overrides give for an embedding, a matrix, a norm and a bias.

    Args:
        optimizer: Megatron's `OptimizerConfig.optimizer`.
        scalars: its `muon_scalar_optimizer`.
    """
    model = nn.Module()
    model.embedding = nn.Embedding(4, 2)
    model.embedding.weight.is_embedding_or_output_parameter = True  # type: ignore[assignment]
    model.linear = nn.Linear(2, 2)
    model.norm = nn.LayerNorm(2)
    given: Any = {
        ParamKey(name="*.bias", predicate=ParamPredicate("vector", lambda p: p.dim() == 1)): {
            "wd_mult": 0.0
        },
        ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 0.5},
    }
    theirs = OptimizerConfig(optimizer=optimizer, muon_scalar_optimizer=scalars, lr=0.1)
    config = settings.optimizer_config(theirs, tensor_parallel=1)
    ours = settings.overrides(given, [model], config)
    assert ours is not None
    result = []
    for name, param in model.named_parameters():
        # The global name is of no concern to Megatron's keys.
        matched = [v for k, v in ours.items() if k.matches("renamed", param, lambda _: False)]
        result.append({"name": name, **{key: v for each in matched for key, v in each.items()}})
    return result
