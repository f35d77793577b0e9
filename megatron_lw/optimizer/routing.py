"""Which child and which parameter group takes which parameter: decided once, here.

Shape and tags decide the child, overrides may change it; the buffers, the children and the report
all read the same table, so they cannot disagree. Groups are identified by name and are the same, in
the same order, on every rank, empty ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lw.child_names import MATRIX_CHILDREN, WHOLE_CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.describe import DescribedModel, ParamInfo, has_attribute
from megatron_lw.optimizer.matrix_view import DEPTHWISE, MatrixView, matrix_view, no_matrix
from megatron_lw.optimizer.names import natural_key
from megatron_lw.overrides import (
    ParamGroupOverride,
    ParamKey,
    check_overrides,
    combine_overrides,
    standard_overrides,
)

_EMBEDDING_ATTRIBUTE = "is_embedding_or_output_parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroupSpec:
    """One parameter group, identified by its name.

    Attributes:
        name: child, domain and what distinguishes its settings, e.g. "adam/dense/wd_mult=0.0".
        child: the child that steps it.
        is_expert: whether it holds expert parameters.
        settings: settings that differ from the configuration, sorted by name.
    """

    name: str
    child: str
    is_expert: bool
    settings: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        info: the parameter's facts.
        group: its parameter group.
        matrix: which matrices its child orthogonalises; None where it steps element by element.
        reason: what decided.
    """

    info: ParamInfo
    group: ParamGroupSpec
    matrix: MatrixView | None
    reason: str

    @property
    def child(self) -> str:
        """The child that steps it."""
        return self.group.child


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing table.

    Attributes:
        routes: one entry a trainable parameter, in canonical order.
        groups: parameter groups, the same and in the same order on every rank.
    """

    routes: tuple[Route, ...]
    groups: tuple[ParamGroupSpec, ...]

    @property
    def group_of(self) -> Mapping[str, str]:
        """Parameter name -> parameter-group name."""
        return {route.info.name: route.group.name for route in self.routes}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitGroup:
    """A group that the caller adds by hand: these parameters, with these settings."""

    params: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]


def decide_routes(
    model: DescribedModel,
    config: OptimizerConfig,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    explicit: Sequence[ExplicitGroup] = (),
) -> tuple[Route, ...]:
    """Decide child and group of every parameter of this rank.

    Args:
        model: facts and parameters.
        config: settings.
        overrides: per-parameter settings; `standard_overrides(config)` if None.
        explicit: groups added by hand; their settings win over those of the overrides.

    Raises:
        ConfigError: two overrides contradict each other, a parameter is in two groups, a matrix
            child is asked for a parameter that is no matrix, or what is declared of one does not
            add up.
    """
    overrides = standard_overrides(config) if overrides is None else overrides
    check_overrides(overrides)
    by_hand = _explicit_settings(explicit)
    routes: list[Route] = []
    for info in model.infos:
        settings = {**_override_of(info, model, overrides), **by_hand.get(info.name, {})}
        child, reason = _choose_child(info, config, settings.pop("optimizer", None))
        routes.append(
            Route(
                info=info,
                group=_group_spec(child, info.domain == "expert", settings),
                matrix=view_under(child, info, split_qkv=config.muon_split_qkv),
                reason=reason,
            )
        )
    return tuple(routes)


def agree_on_groups(routes: Sequence[Route], config: OptimizerConfig, world: Group) -> Routing:
    """Make the list of parameter groups the same on every rank.

    Collective: all-gather of group descriptions over `world`.

    Raises:
        ConfigError: Muon is configured and gets no matrix of the whole model.
    """
    mine = sorted({route.group for route in routes}, key=lambda g: natural_key(g.name))
    specs = {spec for found in all_gather_objects(mine, world) for spec in found}
    wanted = config.optimizer
    if wanted in MATRIX_CHILDREN and not any(spec.child == wanted for spec in specs):
        reasons = sorted({f"{route.info.name} ({route.reason})" for route in routes})
        raise ConfigError(
            f"optimizer={wanted!r}, but no matrix of the model is routed to it: "
            f"{', '.join(reasons[:5])}{', ...' if len(reasons) > 5 else ''}; use "
            "optimizer='adam', or remove the tags and overrides that send its matrices elsewhere"
        )
    return Routing(tuple(routes), tuple(sorted(specs, key=lambda s: natural_key(s.name))))


def _choose_child(info: ParamInfo, config: OptimizerConfig, forced: str | None) -> tuple[str, str]:
    whole = config.optimizer in MATRIX_CHILDREN
    scalar = config.muon_scalar_optimizer if whole else config.optimizer
    shape_reason = no_matrix(info)
    if forced is not None:
        if forced in MATRIX_CHILDREN:
            _require_matrix(info, shape_reason, f"an override sets optimizer={forced!r}")
        return forced, "override"
    if not whole:
        return scalar, f"optimizer={config.optimizer}"
    if info.use_muon is not None:
        if info.use_muon:
            _require_matrix(info, shape_reason, "use_muon=True")
        return (config.optimizer if info.use_muon else scalar), f"use_muon={info.use_muon}"
    if info.role in ("embedding", "output"):
        return scalar, f"{info.role} weight"
    if shape_reason is not None:
        return scalar, shape_reason
    return config.optimizer, "matrix"


def view_under(child: str, info: ParamInfo, *, split_qkv: bool = True) -> MatrixView | None:
    """Which matrices a parameter is to the child that steps it; None if that asks for none.

    Args:
        child: its name.
        info: the parameter.
        split_qkv: see `matrix_view`.

    Raises:
        ConfigError: what is declared of it does not add up.
    """
    if child not in MATRIX_CHILDREN:
        return None
    return matrix_view(info, split_qkv=split_qkv, whole=child in WHOLE_CHILDREN)


def _require_matrix(info: ParamInfo, shape_reason: str | None, asked: str) -> None:
    """Refuse a matrix child for what is none; a depthwise convolution may be asked for."""
    if shape_reason not in (None, DEPTHWISE):
        raise ConfigError(
            f"parameter {info.name!r} of shape {info.local_shape} is no matrix ({shape_reason}), "
            f"but {asked} for it: drop that, and the element-wise child takes it"
        )


def _override_of(
    info: ParamInfo, model: DescribedModel, overrides: Mapping[ParamKey, ParamGroupOverride]
) -> Mapping[str, Any]:
    param = model.params[info.name]

    def has(attribute: str) -> bool:
        tagged = attribute == _EMBEDDING_ATTRIBUTE and info.role in ("embedding", "output")
        return tagged or has_attribute(param, attribute)

    matched = [(k, o) for k, o in overrides.items() if k.matches(info.name, param, has)]
    return combine_overrides(info.name, matched)


def _explicit_settings(
    explicit: Sequence[ExplicitGroup],
) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    for group in explicit:
        for name in group.params:
            if name in settings:
                raise ConfigError(f"parameter {name!r} is in two of the added parameter groups")
            settings[name] = dict(group.settings)
    return settings


def _group_spec(child: str, is_expert: bool, settings: Mapping[str, Any]) -> ParamGroupSpec:
    ordered = tuple(sorted(settings.items()))
    parts = [child, "expert" if is_expert else "dense"]
    parts += [f"{key}={value}" for key, value in ordered]
    return ParamGroupSpec(name="/".join(parts), child=child, is_expert=is_expert, settings=ordered)
