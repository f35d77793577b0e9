"""Our configuration from Megatron's: `OptimizerConfig`, `DistributedDataParallelConfig`, overrides.

Field names are the same on both sides, so that values carry over as they are; `OPTIMIZER_EDGE` and
`DDP_EDGE` list the fields whose values are translated. What cannot be honoured is refused by our
configuration classes, by name and with the remedy.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from megatron_lw.child_names import MATRIX_CHILDREN, MUON_CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.errors import ConfigError
from megatron_lw.field_status import IgnoredSettingWarning
from megatron_lw.overrides import (
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)

_OF_SCALARS = "of 'lion' as muon_scalar_optimizer: {}; 'lion' as optimizer has Adam's"

OPTIMIZER_EDGE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "muon_tp_mode": (
            "honoured",
            "'duplicated' and 'distributed' compute what our 'owner' computes, as 'blockwise' does "
            "without tensor parallelism; with it 'blockwise' is passed on",
        ),
        "loss_scale": ("honoured", "a constant loss scale; without fp16 a 1 is no scaling"),
        "overlap_param_gather": ("no effect", "DistributedDataParallelConfig decides"),
        "optimizer": (
            "honoured",
            "the child that steps the matrices, 'lion' too; 'adam' and 'sgd' step everything; "
            "'dist_muon' is an older name of 'muon'",
        ),
        "muon_scalar_optimizer": (
            "honoured",
            "the child that steps what Muon does not take; beside 'soap' and 'lion' it is Adam",
        ),
        "lion_beta1": ("honoured", _OF_SCALARS.format("share of the average in its direction")),
        "lion_beta2": ("honoured", _OF_SCALARS.format("decay rate of its average")),
    }
)
"""`OptimizerConfig` field -> what becomes of Megatron's value, where `FIELD_STATUS` says less."""

DDP_EDGE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "num_buckets": ("honoured", "bucket_size is the number of parameters over it"),
    }
)
"""`DistributedDataParallelConfig` field -> the same."""

_OWNER_MODES = ("duplicated", "distributed", "owner")


def optimizer_config(given: Any, *, tensor_parallel: int) -> OptimizerConfig:
    """Our settings from Megatron's `OptimizerConfig`.

    Args:
        given: Megatron's configuration; it is not changed.
        tensor_parallel: ranks that divide a matrix, dense or expert, whichever are more.

    Raises:
        ConfigError: a value cannot be honoured, or a field is unknown; every such field is named.
    """
    if isinstance(given, OptimizerConfig):
        return given
    values = _values(given, OptimizerConfig)
    for dropped in ("timers", "use_distributed_optimizer", "overlap_param_gather"):
        values.pop(dropped, None)
    if values["muon_tp_mode"] in _OWNER_MODES or tensor_parallel == 1:
        values["muon_tp_mode"] = "owner"
    if not values["fp16"] and values["loss_scale"] == 1:
        values["loss_scale"] = None
    if values["optimizer"] == "lion":
        _give_lion_adams_rates(values)
    return OptimizerConfig.from_mapping(values)


def _give_lion_adams_rates(values: dict[str, Any]) -> None:
    """Megatron builds its main Lion with Adam's decay rates, whatever `lion_beta1` says."""
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    for name, adams in (("lion_beta1", "adam_beta1"), ("lion_beta2", "adam_beta2")):
        if values[name] not in (defaults[name], values[adams]):
            warnings.warn(
                f"OptimizerConfig.{name}={values[name]!r} has no effect: with optimizer='lion' "
                f"Megatron takes {adams}={values[adams]!r}; set that",
                IgnoredSettingWarning,
                stacklevel=4,
            )
        values[name] = values[adams]


def ddp_config(given: Any, *, num_parameters: int) -> DDPConfig:
    """Our settings from Megatron's `DistributedDataParallelConfig`.

    Args:
        given: Megatron's configuration; it is not changed.
        num_parameters: elements of this rank's model, which `num_buckets` divides.

    Raises:
        ConfigError: a value cannot be honoured, or a field is unknown; every such field is named.
    """
    if isinstance(given, DDPConfig):
        return given
    values = _values(given, DDPConfig)
    num_buckets = values.pop("num_buckets", None)
    if num_buckets is not None:
        values["bucket_size"] = max(1, num_parameters // num_buckets)
    return DDPConfig.from_mapping(values)


def overrides(
    given: Mapping[Any, Mapping[str, Any]] | None,
    chunks: Sequence[nn.Module],
    config: OptimizerConfig,
) -> dict[ParamKey, ParamGroupOverride] | None:
    """Our overrides from Megatron's, matched by Megatron's own keys against Megatron's own names.

    For every optimizer but Adam and SGD, Megatron's rule for what it steps is added: matrices of
    two dimensions that are neither a word embedding nor an output layer (a table of positions is
    one). Adam steps the rest, or what `muon_scalar_optimizer` says, which goes for Muon only.

    Args:
        given: Megatron's `config_overrides`; they are not changed.
        chunks: the wrapped chunks, whose parameter names the keys match.
        config: our settings.
    """
    main = config.optimizer
    of_matrices = main in MATRIX_CHILDREN or main == "lion"
    if given is None and not of_matrices:
        return None
    names = {id(param): name for chunk in chunks for name, param in chunk.named_parameters()}
    found = {
        _key(key, names): cast(ParamGroupOverride, dict(v)) for key, v in (given or {}).items()
    }
    if of_matrices:
        rest = config.muon_scalar_optimizer if main in MUON_CHILDREN else "adam"
        takes = ParamPredicate(f"taken by Megatron's {main}", _is_matrix)
        leaves = ParamPredicate(f"left by Megatron's {main}", lambda param: not _is_matrix(param))
        found[ParamKey(predicate=takes)] = ParamGroupOverride(optimizer=main)
        found[ParamKey(predicate=leaves)] = ParamGroupOverride(optimizer=rest)
    return found


def _key(key: Any, names: Mapping[int, str]) -> ParamKey:
    """A key that asks Megatron's, with the name that Megatron knows the parameter by."""

    def matches(param: nn.Parameter, _: str) -> bool:
        return bool(key.matches(param, names[id(param)]))

    return ParamKey(with_name_predicate=ParamWithNamePredicate(_text(key), matches))


def _text(key: Any) -> str:
    """The parts of a key that are set, predicates by name: the same text on every rank."""
    parts = []
    for field in dataclasses.fields(key):
        value = getattr(key, field.name)
        items = value if isinstance(value, tuple) else (value,)
        names = [item if isinstance(item, str) else item.name for item in items]
        if names:
            parts.append(f"{field.name}={', '.join(names)}")
    return "; ".join(parts)


def _is_matrix(param: nn.Parameter) -> bool:
    tagged = getattr(param, "is_embedding_or_output_parameter", False)
    return param.dim() == 2 and not tagged and getattr(param, "use_muon", None) is not False


def _values(given: Any, ours: type[Any]) -> dict[str, Any]:
    """Fields of Megatron's dataclass that ours has; one that ours lacks must keep its default."""
    if not dataclasses.is_dataclass(given) or isinstance(given, type):
        raise ConfigError(
            f"{type(given).__name__} is no configuration of Megatron's; pass its dataclass"
        )
    known = {field.name for field in dataclasses.fields(ours)}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name in known:
            values[field.name] = value
        elif field.init and value != default_of(field):
            raise ConfigError(
                f"{type(given).__name__}.{field.name}={value!r} is unknown to this version of "
                f"megatron_lw, written for megatron-core 0.19.2; leave it at {default_of(field)!r}"
            )
    return values


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, made anew where the class makes it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
