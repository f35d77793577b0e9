"""Parameter groups as torch and Megatron schedulers expect them."""

from __future__ import annotations

from typing import Any

from megatron_lw.config import OptimizerConfig
from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.build import Runtime
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.routing import ParamGroupSpec


def make_param_groups(config: OptimizerConfig, runtime: Runtime) -> list[ParamGroup]:
    """One dictionary for each group of the routing, in its order, empty ones included.

    Each has `params` and `name`; `lr`, `weight_decay`, `max_lr`, `min_lr`, `wd_mult`, `lr_mult` for
    schedulers; `is_expert_parallel`, `is_decoupled_lr`, `default_config` as Megatron has them; and
    the settings of its child, read at every step.

    Raises:
        ConfigError: a group has no learning rate.
    """
    members: dict[str, list[Any]] = {spec.name: [] for spec in runtime.routing.groups}
    for route in runtime.routing.routes:
        members[route.group.name].append(runtime.model.params[route.info.name])
    return [_group(config, spec, members[spec.name]) for spec in runtime.routing.groups]


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
        "is_decoupled_lr": config.decoupled_lr is not None and max_lr == config.decoupled_lr,
        "default_config": not any("lr" in key for key in settings),
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        **settings,
    }
    group["lr"] = max_lr * group["lr_mult"]
    group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if spec.child == "adam":
        group["betas"] = (config.adam_beta1, config.adam_beta2)
        group["eps"] = config.adam_eps
    if spec.child == "muon":
        group["momentum"] = config.muon_momentum
        group["nesterov"] = config.muon_nesterov
        group["scale_mode"] = config.muon_scale_mode
        group["extra_scale_factor"] = config.muon_extra_scale_factor
    return group
