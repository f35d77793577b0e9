"""From wrapped model chunks to a running optimizer: the flow of the design, once, at construction.

describe -> agree -> route -> plan -> layout -> buffers -> masters -> children -> publishers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_lw.child_names import ELEMENTWISE_CHILDREN, WHOLE_CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.distributed.gather import Publisher
from megatron_lw.errors import ConfigError
from megatron_lw.groups import DOMAINS, Domain, ParallelGroups
from megatron_lw.optimizer import agree
from megatron_lw.optimizer.children.adam import AdamChild
from megatron_lw.optimizer.children.adam_backends import AdamBackend
from megatron_lw.optimizer.children.base import Child
from megatron_lw.optimizer.children.coefficients import resolve_coefficients
from megatron_lw.optimizer.children.lion import LionChild
from megatron_lw.optimizer.children.muon import Muon
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.sgd import SGDChild
from megatron_lw.optimizer.children.variants import AdaMuon, AdaptiveMuon, NorMuon
from megatron_lw.optimizer.children.whole import WholeChild
from megatron_lw.optimizer.children.whole_optimizers import WholeFactory, resolve_whole
from megatron_lw.optimizer.describe import DescribedModel, describe, logical_numel
from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.names import NameMap
from megatron_lw.optimizer.plan import OwnershipPlan
from megatron_lw.optimizer.plan_routes import plan_routes
from megatron_lw.optimizer.routing import (
    ExplicitGroup,
    Routing,
    agree_on_groups,
    decide_routes,
)
from megatron_lw.optimizer.runtime import Runtime
from megatron_lw.optimizer.stats import counted_runs
from megatron_lw.overrides import ParamGroupOverride, ParamKey

BackendResolver = Callable[[torch.device], AdamBackend]
_FLAG_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}


def build_runtime(
    config: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ParallelGroups,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    resolve_backend: BackendResolver,
    explicit: Sequence[ExplicitGroup] = (),
) -> Runtime:
    """Build everything and attach the buckets to the chunks.

    Collective: all-gathers of digests over the groups; one broadcast a bucket over its reduce
    group, so that replicas start equal. A failure on one rank raises on all.

    Raises:
        ConfigError: the model or the settings cannot be honoured.
        PlanMismatchError: ranks hold different models or settings.
    """
    ddp_config = chunks[0].ddp_config
    model = attempt(lambda: _describe(config, chunks, groups), groups.world)
    agree.agree_on_model(model, groups)
    routes = attempt(lambda: decide_routes(model, config, overrides, explicit), groups.world)
    routing = agree_on_groups(routes, config, groups.world)
    plans = attempt(
        lambda: plan_routes(routes, groups.sizes_of, ddp_config.bucket_size), groups.world
    )
    device = _device(chunks)
    backend = attempt(lambda: resolve_backend(device), groups.world)
    factories = attempt(lambda: _whole_factories(config, routing), groups.world)
    for domain in DOMAINS:
        _agree_on_plan(domain, plans.get(domain), config, ddp_config, backend, groups)
    _agree_on_tied_buckets(plans, groups)

    placed = [
        PlacedBucket(domain, index, _buffer(plan, index, domain, model, ddp_config, groups))
        for domain, plan in plans.items()
        for index in range(len(plan.buckets))
    ]
    after: DistributedDataParallel | None = None
    for number, chunk in reversed(list(enumerate(chunks))):
        buckets = [p for p in placed if plans[p.domain].buckets[p.index].chunk == number]
        chunk.attach([p.buffer for p in buckets], after)
        after = chunk
    for group in (group for place in placed for group in place.buffer.quantised):
        group.keep_initial()
    for chunk in chunks:
        chunk.broadcast_params()
    fp8 = ddp_config.fp8_param_gather
    publishers = {p.buffer: Publisher(MasterRow(p.buffer), fp8_gather=fp8) for p in placed}
    for chunk in chunks:
        chunk.attach_publishers([publishers[bucket] for bucket in chunk.buckets])
    masters = {bucket: publisher.master for bucket, publisher in publishers.items()}
    return Runtime(
        model=model,
        routing=routing,
        plans=plans,
        buckets=tuple(publishers),
        children=_children(config, plans, placed, masters, routing, backend, factories, groups),
        publishers=tuple(publishers.values()),
        counted=counted_runs(tuple(publishers), _counter(model, groups), routing.group_of),
        device=device,
    )


@dataclass(frozen=True, slots=True)
class PlacedBucket:
    """A bucket's storage and its place in the plan of its domain."""

    domain: Domain
    index: int
    buffer: BucketBuffer


def _describe(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups
) -> DescribedModel:
    """Facts of all chunks, each named by its own NameMap, checked against what is supported."""

    def to_global(chunk: int, name: str) -> str:
        return chunks[chunk].names.to_global(chunk, name)

    model = describe([chunk.module for chunk in chunks], groups, NameMap(to_global))
    devices = {str(param.device) for param in model.params.values()}
    if len(devices) > 1:
        raise ConfigError(
            f"parameters are on several devices: {', '.join(sorted(devices))}; one rank has one"
        )
    for info in model.infos:
        if info.dtype != "float32" and info.dtype not in _FLAG_OF_DTYPE:
            raise ConfigError(
                f"parameter {info.name!r} has dtype {info.dtype}; weights are bfloat16, float16 or "
                "float32"
            )
        flags = {"bf16": config.bf16, "fp16": config.fp16}
        flag = _FLAG_OF_DTYPE.get(info.dtype)
        if flag is not None and not flags[flag]:
            raise ConfigError(
                f"parameter {info.name!r} is {info.dtype} but OptimizerConfig.{flag} is False: "
                "set it"
            )
    return model


def _device(chunks: Sequence[DistributedDataParallel]) -> torch.device:
    """Where the model is, frozen parameters included; the CPU for a model without parameters."""
    for chunk in chunks:
        for param in chunk.module.parameters():
            return param.device
    return torch.device("cpu")


def _agree_on_plan(
    domain: Domain,
    plan: OwnershipPlan | None,
    config: OptimizerConfig,
    ddp_config: DDPConfig,
    backend: AdamBackend,
    groups: ParallelGroups,
) -> None:
    """Compare settings, kernel and plan over the ranks that share the domain's buckets."""
    facts: list[agree.Fact] = [
        *agree.settings_facts(config),
        *agree.settings_facts(ddp_config),
        ("Adam kernel", backend.name),
        *(
            []
            if plan is None
            else zip((param.name for param in plan.params), plan.facts(), strict=True)
        ),
    ]
    over = groups.domain(domain).exchange
    agree.agree_on_plan(f"settings and plan of the {domain} domain", facts, over, groups.world)


def _agree_on_tied_buckets(plans: Mapping[Domain, OwnershipPlan], groups: ParallelGroups) -> None:
    """Check that the bucket of a tied weight is laid out alike on all stages that have a copy."""
    facts: list[agree.Fact] = [
        (bucket.tied, (domain, bucket.child, bucket.row_length))
        for domain, plan in plans.items()
        for bucket in plan.buckets
        if bucket.tied is not None
    ]
    agree.agree_on_plan("buckets of tied weights", sorted(facts), groups.embedding, groups.world)


def _buffer(
    plan: OwnershipPlan,
    index: int,
    domain: Domain,
    model: DescribedModel,
    ddp_config: DDPConfig,
    groups: ParallelGroups,
) -> BucketBuffer:
    layout = BucketLayout.build(plan, index)
    names = tuple(plan.params[p].name for p in layout.params)
    dtypes = {model.params[name].dtype for name in names}
    reduce_fp32 = ddp_config.grad_reduce_in_fp32 or torch.float32 in dtypes
    return BucketBuffer(
        layout,
        names,
        model.params,
        groups.domain(domain).reduce,
        divisor=groups.replicas.size if domain == "replicated" else groups.dp.size,
        grad_dtype=torch.float32 if reduce_fp32 else dtypes.pop(),
        average_in_collective=ddp_config.average_in_collective,
        sum_in_fp32=ddp_config.reduce_scatter_with_fp32_accumulation,
        tied=plan.buckets[index].tied is not None and groups.embedding.size > 1,
        sequence_parallel=frozenset(
            info.name for info in model.infos if info.sequence_parallel and info.name in names
        ),
    )


def _children(
    config: OptimizerConfig,
    plans: Mapping[Domain, OwnershipPlan],
    placed: Sequence[PlacedBucket],
    masters: Mapping[BucketBuffer, MasterRow],
    routing: Routing,
    backend: AdamBackend,
    factories: Mapping[str, WholeFactory],
    groups: ParallelGroups,
) -> tuple[Child, ...]:
    """One child for each domain and kind that has buckets, with its process group."""
    children: list[Child] = []
    for domain, plan in plans.items():
        for kind in sorted({bucket.child for bucket in plan.buckets}):
            mine = [p for p in placed if p.domain == domain and plan.buckets[p.index].child == kind]
            rows = [masters[p.buffer] for p in mine]
            if kind in ELEMENTWISE_CHILDREN:
                children.append(_elementwise(kind, rows, routing, backend))
                continue
            routes = {route.info.name: route for route in routing.routes}
            places = rows, [p.index for p in mine], routes, plan, groups.domain(domain)
            if kind in WHOLE_CHILDREN:
                children.append(WholeChild(kind, *places, factories[kind]))
                continue
            children.append(_muon(kind, config, *places))
    return tuple(children)


def _whole_factories(config: OptimizerConfig, routing: Routing) -> Mapping[str, WholeFactory]:
    """The classes of all children that need one, on every rank alike."""
    kinds = sorted({spec.child for spec in routing.groups} & set(WHOLE_CHILDREN))
    return {kind: resolve_whole(config, kind) for kind in kinds}


def _elementwise(
    kind: str, rows: Sequence[MasterRow], routing: Routing, backend: AdamBackend
) -> Child:
    if kind == "adam":
        return AdamChild(rows, routing.group_of, backend)
    return (LionChild if kind == "lion" else SGDChild)(rows, routing.group_of)


def _muon(kind: str, config: OptimizerConfig, *places: Any) -> Child:
    """Muon or one of its variants; `places` are the arguments that they share."""
    make: Callable[..., Child] = {"normuon": NorMuon, "adamuon": AdaMuon}.get(kind, Muon)
    if kind == "adaptive_muon":
        make = partial(AdaptiveMuon, config.adaptive_muon_moment2_method)
    options = {"pad": config.muon_pad_batches, "tp_mode": config.muon_tp_mode}
    return make(*places, _newton_schulz(config), **options)


def _newton_schulz(config: OptimizerConfig) -> NewtonSchulz:
    given = config.muon_coefficients
    coefficients = resolve_coefficients(
        config.muon_coefficient_type if given is None else given, config.muon_num_ns_steps
    )
    dtype = config.muon_dtype
    if dtype is None:
        medium = config.muon_fp32_matmul_prec == "medium"
        dtype = torch.bfloat16 if medium else torch.float32
    return NewtonSchulz(coefficients=coefficients, dtype=dtype, iteration=config.muon_iteration)


def _counter(model: DescribedModel, groups: ParallelGroups) -> Callable[[str], int]:
    """How many leading local elements of a parameter this rank counts in the statistics.

    Of tensor-parallel replicas the first counts, of tied copies the one on the first stage, of a
    parameter that is padded inside only its logical rows.
    """
    infos = {info.name: info for info in model.infos}

    def counted(name: str) -> int:
        info = infos[name]
        tensor = groups.domain(info.domain).tensor
        if info.tied is not None and groups.embedding.rank > 0:
            return 0
        if info.tp_dim is None and tensor.rank > 0:
            return 0
        return logical_numel(info, tensor.rank)

    return counted
