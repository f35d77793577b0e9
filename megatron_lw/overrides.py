"""Overrides: which parameters take other settings than the rest, and which settings.

A mapping of :class:`ParamKey` to :class:`ParamGroupOverride` is applied to each parameter: every
key that matches contributes its settings, in whatever order, and two that set one field to
different values are an error. Parameters with equal settings form a group.

Class names, their fields and positional arguments are those of megatron-core 0.19.2. A key asks
about attributes through a callable that it is handed, as only `optimizer.describe` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypedDict, TypeVar, cast

import torch

from megatron_lw.child_names import CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.errors import ConfigError
from megatron_lw.field_status import Allowed, flag, number, one_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ParamPredicate:
    """A test of a parameter; two with one name are equal, as functions cannot be compared."""

    name: str
    """Name of the test, by which it is compared, hashed and printed."""
    fn: Callable[[torch.nn.Parameter], bool] = field(compare=False)
    """The test; must give the same answer on every rank."""

    def __call__(self, param: torch.nn.Parameter) -> bool:
        """Return whether the parameter passes."""
        return self.fn(param)


@dataclass(frozen=True, slots=True)
class ParamWithNamePredicate:
    """A test of a parameter and its name; two with one name are equal."""

    name: str
    """Name of the test, by which it is compared, hashed and printed."""
    fn: Callable[[torch.nn.Parameter, str], bool] = field(compare=False)
    """The test, given parameter and parameter name; must give the same answer on every rank."""

    def __call__(self, param: torch.nn.Parameter, name: str) -> bool:
        """Return whether the parameter of this name passes."""
        return self.fn(param, name)


def _items(given: _T | tuple[_T, ...]) -> tuple[_T, ...]:
    return given if isinstance(given, tuple) else (given,)


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Selects parameters: one is selected if any part of the key matches it.

    Raises:
        ConfigError: a part is of another type, or the key has no part and so selects nothing.
    """

    name: str | tuple[str, ...] = ()
    """Shell patterns (`*`, `?`, `[...]`) for the whole parameter name; case counts."""
    attr: str | tuple[str, ...] = ()
    """Attributes; one that the parameter has, and that is true, matches."""
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    """Tests of the parameter."""
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()
    """Tests of the parameter and its name, say to leave some names out of what else would match."""

    def __post_init__(self) -> None:
        """Check the type of every part; a list, say, could not be hashed later."""
        wanted = (str, str, ParamPredicate, ParamWithNamePredicate)
        for (part, given), kind in zip(self._parts(), wanted, strict=True):
            if not all(isinstance(item, kind) for item in given):
                raise ConfigError(
                    f"ParamKey.{part}={given!r} is not made of {kind.__name__}; "
                    f"give one {kind.__name__} or a tuple of them"
                )
        if not any(given for _, given in self._parts()):
            raise ConfigError(
                "ParamKey() selects no parameter; give name, attr, predicate or with_name_predicate"
            )

    def __str__(self) -> str:
        """Return the parts that are set, predicates by name: the same text on every rank."""
        texts = [
            f"{part}={', '.join(item if isinstance(item, str) else item.name for item in given)}"
            for part, given in self._parts()
            if given
        ]
        return f"ParamKey({'; '.join(texts)})"

    def matches(
        self, name: str, param: torch.nn.Parameter, has_attribute: Callable[[str], bool]
    ) -> bool:
        """Return whether the key selects the parameter.

        Args:
            name: name of the parameter.
            param: the parameter, handed to the predicates.
            has_attribute: whether the parameter has an attribute of that name that is true.
        """
        return (
            any(fnmatchcase(name, pattern) for pattern in _items(self.name))
            or any(has_attribute(attribute) for attribute in _items(self.attr))
            or any(test(param) for test in _items(self.predicate))
            or any(test(param, name) for test in _items(self.with_name_predicate))
        )

    def _parts(
        self,
    ) -> Iterator[tuple[str, tuple[str | ParamPredicate | ParamWithNamePredicate, ...]]]:
        yield "name", _items(self.name)
        yield "attr", _items(self.attr)
        yield "predicate", _items(self.predicate)
        yield "with_name_predicate", _items(self.with_name_predicate)


class ParamGroupOverride(TypedDict, total=False):
    """Settings that a parameter takes instead of the configuration's; each may be absent."""

    max_lr: float
    """Upper end of the learning-rate schedule, in place of `OptimizerConfig.lr`."""
    min_lr: float
    """Lower end of the schedule, in place of `OptimizerConfig.min_lr`."""
    start_wd: float
    """Weight decay at the start of the schedule, for the scheduler."""
    end_wd: float
    """Weight decay at the end of the schedule, for the scheduler."""
    wd_mult: float
    """Multiplies the weight decay."""
    lr_mult: float
    """Multiplies the learning rate."""
    weight_decay_mode: str
    """How the weight decays, in place of `OptimizerConfig.weight_decay_mode`."""
    clip_grad: bool
    """Whether `OptimizerConfig.clip_grad` acts on the gradients."""
    eps: float
    """Keeps a denominator from zero, where the child has one (Adam, second moments of Muon)."""
    optimizer: str
    """The child that steps the parameter, by its name in `child_names`."""


OVERRIDE_FIELDS: Mapping[str, Allowed] = MappingProxyType(
    {
        "max_lr": number(0),
        "min_lr": number(0),
        "start_wd": number(0),
        "end_wd": number(0),
        "wd_mult": number(0),
        "lr_mult": number(0),
        "weight_decay_mode": one_of("decoupled", "independent", "l2", "cautious"),
        "clip_grad": flag(),
        "eps": number(0, open_low=True),
        "optimizer": one_of(*CHILDREN),
    }
)


def check_overrides(overrides: Mapping[ParamKey, ParamGroupOverride]) -> None:
    """Check the fields and values of every override, matched or not.

    Raises:
        ConfigError: an override has an unknown field, or a value that is not allowed.
    """
    for key, override in overrides.items():
        for setting, value in override.items():
            if setting not in OVERRIDE_FIELDS:
                raise ConfigError(
                    f"the override of {key} sets {setting}={value!r}, which cannot be overridden; "
                    f"these can: {', '.join(OVERRIDE_FIELDS)}"
                )
            allowed = OVERRIDE_FIELDS[setting]
            if not allowed.test(value):
                raise ConfigError(
                    f"the override of {key} sets {setting}={value!r}, which is not {allowed.text}; "
                    "give one of these values"
                )


def combine_overrides(
    name: str, matched: Sequence[tuple[ParamKey, ParamGroupOverride]]
) -> ParamGroupOverride:
    """Return the union of the overrides that match one parameter.

    Args:
        name: name of the parameter, for the message.
        matched: keys that match the parameter, each with its override.

    Raises:
        ConfigError: two of them set one field to different values.
    """
    combined: dict[str, tuple[object, ParamKey]] = {}
    for key, override in matched:
        for setting, value in override.items():
            earlier, earlier_key = combined.setdefault(setting, (value, key))
            if earlier != value:
                raise ConfigError(
                    f"{name}: {setting} is {earlier!r} by {earlier_key} and {value!r} by {key}; "
                    f"make the two agree, or let only one of them match {name}"
                )
    union = {setting: value for setting, (value, _) in combined.items()}
    return cast(ParamGroupOverride, union)


def _is_vector(param: torch.nn.Parameter) -> bool:
    return param.ndim == 1


def _is_undecayed(param: torch.nn.Parameter, name: str) -> bool:
    normalises_qk = "q_layernorm." in name or "k_layernorm." in name
    return (param.ndim == 1 or name.endswith(".bias")) and not normalises_qk


def standard_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides that apply where a caller gives none.

    Biases and 1-D parameters are not decayed; with `apply_wd_to_qk_layernorm` those of the layer
    norms of queries and keys are. With `decoupled_lr` the embedding and output parameters follow a
    learning-rate schedule of their own.
    """
    if config.apply_wd_to_qk_layernorm:
        test = ParamWithNamePredicate("vector_or_bias_not_qk_layernorm", _is_undecayed)
        undecayed = ParamKey(with_name_predicate=test)
    else:
        undecayed = ParamKey(name="*.bias", predicate=ParamPredicate("vector", _is_vector))
    overrides = {undecayed: ParamGroupOverride(wd_mult=0.0)}
    if config.decoupled_lr is not None:
        schedule = ParamGroupOverride(max_lr=config.decoupled_lr)
        if config.decoupled_min_lr is not None:
            schedule["min_lr"] = config.decoupled_min_lr
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = schedule
    return overrides
