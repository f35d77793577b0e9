"""Parameter groups as torch and Megatron schedulers expect them, and what their settings may be."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from megatron_lw.config import OptimizerConfig
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.child_settings import CHILD_SETTINGS, child_settings
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.routing import ExplicitGroup, ParamGroupSpec
from megatron_lw.optimizer.runtime import Runtime
from megatron_lw.overrides import ParamGroupOverride, ParamKey, check_overrides

FINGERPRINT_BITS = 16
POLICIES = frozenset({"clip_grad"})
"""Settings of a group that are the present configuration's: a checkpoint never restores them."""


def make_param_groups(
    config: OptimizerConfig, runtime: Runtime, before: Sequence[ParamGroup] = ()
) -> list[ParamGroup]:
    """One dictionary for each group of the routing, empty ones included, alike on every rank.

    Each has `params` and `name`; `lr`, `weight_decay`, `max_lr`, `min_lr`, `wd_mult`, `lr_mult` for
    schedulers; `is_expert_parallel`, `is_decoupled_lr`, `default_config` as Megatron has them;
    `clip_grad`, whether its gradients are clipped; and the settings of its child, read at every
    step.

    Args:
        config: where settings come from that no override gives.
        runtime: the routing and the parameters.
        before: earlier groups: they keep their place and their present settings, also where they
            have lost their members; new ones follow, in natural order.

    Raises:
        ConfigError: a group has no learning rate, or there is nothing to train on any rank.
    """
    specs = {spec.name: spec for spec in runtime.routing.groups}
    if not specs:
        raise ConfigError("the model has no trainable parameter on any rank")
    members: dict[str, list[Any]] = {name: [] for name in specs}
    for route in runtime.routing.routes:
        members[route.group.name].append(runtime.model.params[route.info.name])
    kept = [{**group, "params": members.pop(group["name"], [])} for group in before]
    return kept + [_group(config, specs[name], params) for name, params in members.items()]


def common_settings(groups: Sequence[ParamGroup]) -> ParamGroup:
    """The settings that every group has, which torch's schedulers look for before they cycle one.

    Values are the first group's: like torch's `Optimizer.defaults`, nothing reads them in a step.
    """
    names = [CHILD_SETTINGS[group["optimizer"]].keys() for group in groups]
    return {name: groups[0][name] for name in names[0] if all(name in each for each in names)}


def explicit_group(
    param_group: Mapping[str, Any], names: Mapping[int, str], present: Sequence[ExplicitGroup]
) -> ExplicitGroup:
    """What a caller of `add_param_group` asks for.

    Args:
        param_group: `params` (a parameter, a list of them or of (name, parameter) pairs) and
        settings.
        names: id of a parameter of the wrapped model -> its global name.
        present: groups added before.

    Raises:
        ConfigError: no or unknown parameters, a frozen one, one that is in a group already, or an
            unknown setting.
    """
    settings = {key: value for key, value in param_group.items() if key != "params"}
    given = param_group.get("params", ())
    given = [given] if isinstance(given, torch.Tensor) else list(given)
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
    if not params:
        raise ConfigError("add_param_group needs 'params' with at least one parameter")
    for param in params:
        if id(param) not in names:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is not one of the wrapped model's; "
                "only those can be stepped"
            )
        if not param.requires_grad:
            raise ConfigError(f"parameter {names[id(param)]!r} is frozen: set requires_grad first")
    members = tuple(names[id(param)] for param in params)
    for name in members:
        if members.count(name) > 1 or any(name in group.params for group in present):
            raise ConfigError(f"parameter {name!r} would be in two of the added parameter groups")
    if "lr" in settings and "max_lr" in settings:
        raise ConfigError("add_param_group got both lr and max_lr, which are one setting; drop one")
    if "lr" in settings:
        settings["max_lr"] = settings.pop("lr")
    check_overrides({ParamKey(name=members): cast(ParamGroupOverride, settings)})
    return ExplicitGroup(params=members, settings=tuple(sorted(settings.items())))


def names_by_id(chunks: Sequence[DistributedDataParallel]) -> dict[int, str]:
    """Id of each parameter of the wrapped model -> its global name."""
    return {
        id(param): name
        for number, chunk in enumerate(chunks)
        for name, param in chunk.named_global_parameters(number)
    }


def check_settings(groups: Sequence[ParamGroup]) -> None:
    """Check what a scheduler or the user may have written, before a step writes anything.

    Raises:
        ConfigError: naming the group, the setting and its value.
    """
    for group in groups:
        for setting, (allowed, text) in CHILD_SETTINGS[group["optimizer"]].items():
            if not allowed(group[setting]):
                raise ConfigError(
                    f"parameter group {group['name']!r} has {setting} = {group[setting]!r}; "
                    f"it must be {text}"
                )


def fingerprint(groups: Sequence[ParamGroup]) -> int:
    """A number below 2**16 that differs where the settings of a step differ."""
    values = [
        (group["name"], [repr(group.get(name)) for name in CHILD_SETTINGS[group["optimizer"]]])
        for group in groups
    ]
    return zlib.crc32(repr(values).encode()) >> (32 - FINGERPRINT_BITS)


def exempt_from_clipping(groups: Sequence[ParamGroup]) -> frozenset[str]:
    """Names of the groups whose gradients are not clipped: those with `clip_grad` False."""
    return frozenset(group["name"] for group in groups if not group["clip_grad"])


def _group(config: OptimizerConfig, spec: ParamGroupSpec, params: list[Any]) -> ParamGroup:
    settings = dict(spec.settings)
    max_lr = settings.get("max_lr", config.lr)
    if max_lr is None:
        raise ConfigError(
            f"parameter group {spec.name!r} has no learning rate: set OptimizerConfig.lr "
            "or max_lr in its override"
        )
    group: ParamGroup = {
        "params": params,
        "name": spec.name,
        "optimizer": spec.child,
        "is_expert_parallel": spec.is_expert,
        "is_decoupled_lr": False,  # as in Megatron: max_lr tells such a group from others
        "default_config": not any("lr" in key for key in settings),
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        **settings,
    }
    group["lr"] = max_lr * group["lr_mult"]
    group["weight_decay"] = config.weight_decay * group["wd_mult"]
    for setting, value in child_settings(config, spec.child).items():
        group.setdefault(setting, value)
    return group
