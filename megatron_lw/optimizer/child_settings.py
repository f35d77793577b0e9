"""What a child reads of its parameter groups: where it comes from, and what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron_lw.child_names import MUON_CHILDREN, WHOLE_CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.children.decay import DECAY_MODES
from megatron_lw.optimizer.children.muon import SCALE_MODES

Setting = tuple[Callable[[Any], bool], str]
"""A test of a value, and the values that pass it in words."""


def child_settings(config: OptimizerConfig, child: str) -> ParamGroup:
    """The settings of a child as the configuration gives them, besides `lr` and `weight_decay`."""
    mode = config.weight_decay_mode if config.decoupled_weight_decay else "l2"
    common: ParamGroup = {"clip_grad": child not in MUON_CHILDREN or config.muon_clip_grad}
    if child not in WHOLE_CHILDREN:
        common["weight_decay_mode"] = mode
    if child == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return {**common, "betas": betas, "eps": config.adam_eps}
    if child == "lion":
        return {**common, "betas": (config.lion_beta1, config.lion_beta2)}
    if child == "sgd":
        return {**common, "momentum": config.sgd_momentum}
    if child in MUON_CHILDREN:
        return {**common, **_muon_settings(config, child)}
    return common


def _muon_settings(config: OptimizerConfig, child: str) -> ParamGroup:
    settings: ParamGroup = {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "extra_scale_factor": config.muon_extra_scale_factor,
    }
    if child != "adamuon":
        settings["scale_mode"] = config.muon_scale_mode
    if child != "muon":
        settings |= {"beta2": config.adaptive_muon_beta2, "eps": config.adaptive_muon_eps}
    return settings


def _is_size(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _is_rate(value: float) -> bool:
    return 0 <= value < 1


def _are_rates(value: tuple[float, float]) -> bool:
    return len(value) == 2 and all(_is_rate(v) for v in value)


_SIZE: Setting = (_is_size, "a finite number of at least 0")
_RATE: Setting = (_is_rate, "a number in [0, 1)")
_RATES: Setting = (_are_rates, "two numbers in [0, 1)")
_ABOVE_ZERO: Setting = (lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
_FLAG: Setting = (lambda value: isinstance(value, bool), "True or False")
_WHOLE: Mapping[str, Setting] = {"lr": _SIZE, "weight_decay": _SIZE, "clip_grad": _FLAG}
_COMMON: Mapping[str, Setting] = {
    **_WHOLE,
    "weight_decay_mode": (lambda value: value in DECAY_MODES, f"one of {', '.join(DECAY_MODES)}"),
}
_MOMENTUM: Mapping[str, Setting] = {
    **_COMMON,
    "momentum": _RATE,
    "nesterov": _FLAG,
    "extra_scale_factor": _SIZE,
}
_SCALED: Mapping[str, Setting] = {
    "scale_mode": (lambda value: value in SCALE_MODES, f"one of {', '.join(SCALE_MODES)}"),
}
_SECOND_MOMENT: Mapping[str, Setting] = {"beta2": _RATE, "eps": _ABOVE_ZERO}

CHILD_SETTINGS: Mapping[str, Mapping[str, Setting]] = MappingProxyType(
    {
        "adam": {**_COMMON, "betas": _RATES, "eps": _ABOVE_ZERO},
        "lion": {**_COMMON, "betas": _RATES},
        "sgd": {**_COMMON, "momentum": _RATE},
        "muon": {**_MOMENTUM, **_SCALED},
        "normuon": {**_MOMENTUM, **_SCALED, **_SECOND_MOMENT},
        "adamuon": {**_MOMENTUM, **_SECOND_MOMENT},
        "adaptive_muon": {**_MOMENTUM, **_SCALED, **_SECOND_MOMENT},
        **{child: _WHOLE for child in WHOLE_CHILDREN},
    }
)
"""Child -> setting -> what it may be; a step reads these and compares them over the ranks."""
