"""Which child and which parameter group takes which parameter: decided once, here.

Shape and tags decide the child, overrides may change it; the buffers, the children and the report
all read the same table, so they cannot disagree. Groups are identified by name and are the same, in
the same order, on every rank, empty ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lw.child_names import MATRIX_CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.boxes import BoxPair, tensor_parallel_boxes
from megatron_lw.optimizer.describe import DescribedModel, ParamInfo, has_attribute
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
class MatrixView:
    """Which matrix, or stack of equal matrices, a parameter is.

    Attributes:
        count: matrices stacked in it.
        rows: rows of one whole (global) matrix: outputs.
        cols: columns of one whole matrix: inputs.
        tp_dim: dimension of one matrix that tensor parallelism divides; None where it does not.
        blocks: rows of the fused matrices in one matrix, each divided by itself; None: one block.
    """

    count: int
    rows: int
    cols: int
    tp_dim: int | None = None
    blocks: tuple[int, ...] | None = None

    def shard_boxes(self, tp_size: int) -> tuple[tuple[BoxPair, ...], ...]:
        """For each tensor-parallel rank, which box of its local matrix is which of the whole."""
        if self.tp_dim is None or tp_size == 1:
            return ()
        shape = [self.rows, self.cols]
        shape[self.tp_dim] //= tp_size
        return tuple(
            tensor_parallel_boxes("matrix", tuple(shape), self.tp_dim, self.blocks, tp_size, t)[1]
            for t in range(tp_size)
        )


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
        view: which matrix it is, whoever steps it; None if it is none.
        reason: what decided.
    """

    info: ParamInfo
    group: ParamGroupSpec
    view: MatrixView | None
    reason: str

    @property
    def child(self) -> str:
        """The child that steps it."""
        return self.group.child

    @property
    def matrix(self) -> MatrixView | None:
        """The matrix that its child orthogonalises; None where it steps element by element."""
        return self.view if self.child in MATRIX_CHILDREN else None


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

    def report(self) -> str:
        """A table of every parameter with its child, group, matrix and the reason."""
        header = ("parameter", "shape", "dtype", "child", "matrix", "group", "because")
        rows = [
            (
                route.info.name,
                "x".join(map(str, route.info.local_shape)) or "scalar",
                route.info.dtype,
                route.child,
                _matrix_text(route.matrix),
                route.group.name,
                route.reason,
            )
            for route in self.routes
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, *rows]
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitGroup:
    """A group that the caller adds by hand: these parameters, with these settings."""

    params: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]


def matrix_view(info: ParamInfo) -> MatrixView | None:
    """Which matrix a parameter is; None where it is none.

    A 2-D weight is a matrix as it stands; a convolution (3-D to 5-D) is
    `[out_channels, product of the rest]`; a declared stack is a batch of matrices. The shape is the
    global one without padding rows. A depthwise convolution (one input channel) is no matrix.
    """
    shape = info.global_shape
    if info.ep_size > 1:
        shape = (shape[0] // info.ep_size, *shape[1:])
    if len(shape) < 2 or 0 in shape:
        return None
    tp_dim = info.tp_dim
    if info.matrices > 1 and len(shape) >= 3:
        if shape[0] != info.matrices or len(shape) > 3:
            raise ConfigError(
                f"parameter {info.name!r}: matrices = {info.matrices} of a parameter of shape "
                f"{shape}; a stack is [matrices, rows, cols] or [matrices * rows, cols]"
            )
        tp_dim = None if tp_dim is None else tp_dim - 1
        shape = (shape[0] * shape[1], shape[2])
    elif len(shape) >= 3 and shape[1] == 1:
        return None
    rows = shape[0]
    cols = 1
    for extent in shape[1:]:
        cols *= extent
    if tp_dim is not None and _cuts_across(info, tp_dim):
        raise ConfigError(
            f"parameter {info.name!r} of shape {shape} is divided along dimension {info.tp_dim}, "
            "which does not divide its matrices into rows or columns; use_muon=False sends it to "
            "the element-wise child"
        )
    return MatrixView(
        count=info.matrices,
        rows=rows // info.matrices,
        cols=cols,
        tp_dim=tp_dim,
        blocks=info.blocks if info.matrices == 1 else None,
    )


def _cuts_across(info: ParamInfo, tp_dim: int) -> bool:
    """Whether tensor parallelism divides a stack itself, or a convolution inside its columns."""
    dims = len(info.global_shape)
    if info.matrices > 1:
        return tp_dim < 0 or (dims == 2 and tp_dim == 0)
    return dims > 2 and tp_dim > 1


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
        ConfigError: two overrides contradict each other, a parameter is in two groups, or a matrix
            child is asked for a parameter that is no matrix.
    """
    overrides = standard_overrides(config) if overrides is None else overrides
    check_overrides(overrides)
    by_hand = _explicit_settings(explicit)
    routes: list[Route] = []
    for info in model.infos:
        settings = {**_override_of(info, model, overrides), **by_hand.get(info.name, {})}
        view = matrix_view(info)
        child, reason = _choose_child(info, view, config, settings.pop("optimizer", None))
        if child in MATRIX_CHILDREN and info.logical_rows is not None:
            raise ConfigError(
                f"parameter {info.name!r}: logical_rows = {info.logical_rows} of a matrix that "
                "Muon steps: padding inside a matrix is not supported yet; use_muon=False sends "
                f"it to {config.muon_scalar_optimizer}"
            )
        routes.append(
            Route(
                info=info,
                group=_group_spec(child, info.domain == "expert", settings),
                view=view,
                reason=reason,
            )
        )
    return tuple(routes)


def agree_on_groups(routes: Sequence[Route], config: OptimizerConfig, world: Group) -> Routing:
    """Make the list of parameter groups the same on every rank.

    Collective: all-gather of group descriptions over `world`.

    Raises:
        ConfigError: Muon is configured and gets none of the model's matrices.
    """
    mine = (
        sorted({route.group for route in routes}, key=lambda g: natural_key(g.name)),
        any(route.view is not None for route in routes),
    )
    gathered = all_gather_objects(mine, world)
    specs = {spec for found, _ in gathered for spec in found}
    has_matrix = any(found for _, found in gathered)
    wanted = config.optimizer
    if wanted in MATRIX_CHILDREN and has_matrix and not any(s.child == wanted for s in specs):
        raise ConfigError(
            f"optimizer={wanted!r}, but none of the model's matrices is routed to {wanted}; use "
            "optimizer='adam', or remove the tags and overrides that send them elsewhere"
        )
    return Routing(tuple(routes), tuple(sorted(specs, key=lambda s: natural_key(s.name))))


def _choose_child(
    info: ParamInfo, view: MatrixView | None, config: OptimizerConfig, forced: str | None
) -> tuple[str, str]:
    whole = config.optimizer in MATRIX_CHILDREN
    scalar = config.muon_scalar_optimizer if whole else config.optimizer
    if forced is not None:
        if forced in MATRIX_CHILDREN and view is None:
            raise ConfigError(
                f"parameter {info.name!r} of shape {info.local_shape} is no matrix; "
                f"an override sets optimizer={forced!r} for it: remove it or use 'adam'"
            )
        return forced, "override"
    if not whole:
        return scalar, f"optimizer={config.optimizer}"
    if info.use_muon is not None:
        return (config.optimizer if info.use_muon else scalar), f"use_muon={info.use_muon}"
    if info.role in ("embedding", "output"):
        return scalar, f"{info.role} weight"
    if view is None:
        return scalar, "no matrix"
    return config.optimizer, "matrix"


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


def _matrix_text(view: MatrixView | None) -> str:
    if view is None:
        return "-"
    shape = f"{view.rows}x{view.cols}"
    return shape if view.count == 1 else f"{view.count} of {shape}"
