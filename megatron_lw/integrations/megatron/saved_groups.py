"""Parameter groups as Megatron's optimizers save them, and ours from what they saved.

Megatron keeps an optimizer for each kind of parameter (Muon's, the rest, those of experts) and
saves their groups one after another; it finds them again by their settings. Ours have a name too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_lw.child_names import MATRIX_CHILDREN, WHOLE_CHILDREN
from megatron_lw.config import OptimizerConfig
from megatron_lw.dist_checkpointing.snapshot import settings_of
from megatron_lw.optimizer.children.base import ParamGroup
from megatron_lw.optimizer.param_groups import POLICIES

STEPS = "num_steps"
_TORCH_ADAM = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "bias_correction": True,
}
"""What Adam of torch and of Transformer Engine look for in a loaded group."""
_TORCH_SGD = {
    "dampening": 0,
    "nesterov": False,
    "maximize": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
}
_OF_SCHEDULES = frozenset(("lr", "max_lr", "min_lr", "weight_decay", "start_wd", "end_wd"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A parameter group that was saved.

    Attributes:
        settings: all of it.
        child: what steps it.
        num_steps: steps taken; None if it was not saved.
    """

    settings: Mapping[str, Any]
    child: str
    num_steps: int | None


def written_groups(
    groups: Sequence[ParamGroup],
    config: OptimizerConfig,
    steps: Mapping[str, int],
    *,
    layer_wise: bool,
) -> list[list[dict[str, Any]]]:
    """Our groups by the optimizer of Megatron's that would step them, in its order.

    Args:
        groups: ours.
        config: settings.
        steps: child -> steps taken.
        layer_wise: whether Megatron's would keep experts in the optimizer of the rest.
    """
    found: dict[tuple[bool, str, bool], list[dict[str, Any]]] = {}
    for group in groups:
        child = group["optimizer"]
        apart = group["is_expert_parallel"] and not layer_wise
        written = _written(group, config, steps.get(child, 0))
        found.setdefault((child != config.optimizer, child, apart), []).append(written)
    return [found[key] for key in sorted(found)]


def saved_groups(state: Mapping[Any, Any], config: OptimizerConfig) -> list[SavedGroup]:
    """All groups in what Megatron loaded for the optimizer, without tensors.

    Args:
        state: by Megatron's optimizer, or of the only one.
        config: settings; a group that names no optimizer is of its `optimizer`.
    """
    found = []
    for each in _optimizers(state):
        inner = each.get("optimizer", each)
        common = inner.get("state", {}).get("common_step")
        for group in inner.get("param_groups", ()):
            steps = next(
                (s for s in (common, group.get("step"), group.get(STEPS)) if s is not None), None
            )
            found.append(
                SavedGroup(
                    settings=group,
                    child=_child_of(group, config),
                    num_steps=None if steps is None else int(steps),
                )
            )
    return found


def steps_of(child: str, saved: Sequence[SavedGroup], *, alone: bool) -> int:
    """Steps that a child had taken; the most of any, where Megatron counts only some.

    Args:
        child: which.
        saved: all groups.
        alone: whether each child was counted.
    """
    counts = [(each.child, each.num_steps) for each in saved if each.num_steps is not None]
    own = [count for kind, count in counts if kind == child]
    return max(own if alone and own else [count for _, count in counts], default=0)


def grad_scaler(state: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """The state of a loss scaler that Megatron saved, as plain numbers."""
    for each in _optimizers(state):
        saved = each.get("grad_scaler")
        if saved:
            return {
                "scale": float(saved["scale"]),
                "growth_tracker": int(saved["growth_tracker"]),
                "hysteresis_tracker": max(0, int(saved["hysteresis_tracker"])),
            }
    return None


def find_group(group: ParamGroup, saved: Sequence[SavedGroup]) -> SavedGroup | None:
    """The saved group that is ours: by name, else by what Megatron tells groups by.

    Earlier releases of Megatron mark decoupled learning rates, which differ in `max_lr` anyway.
    """
    of_child = [each for each in saved if each.child == group["optimizer"]]
    named = [each for each in of_child if each.settings.get("name") == group["name"]]
    passed_over = ("optimizer", "is_decoupled_lr")
    keys = [key for key in param_group_identifier_keys if key not in passed_over]
    alike = [
        each for each in of_child if all(each.settings.get(key) == group.get(key) for key in keys)
    ]
    return next(iter([*named, *alike]), None)


def settings_from(group: ParamGroup, saved: SavedGroup, *, keep: bool) -> dict[str, Any]:
    """The saved settings that our group has: they win, as in every load.

    Args:
        group: ours.
        saved: what it was.
        keep: whether those that a schedule goes by stay as they are.
    """
    kept = POLICIES | (_OF_SCHEDULES if keep else frozenset())
    found = settings_of(saved.settings)
    return {k: v for k, v in found.items() if k in group and k not in kept}


def _child_of(group: Mapping[str, Any], config: OptimizerConfig) -> str:
    """What steps a saved group: it is named, or the main optimizer of the run that saved."""
    named = group.get("optimizer")
    if named or config.optimizer in WHOLE_CHILDREN:
        return named or config.optimizer
    if "betas" in group:
        return "adam" if "eps" in group else "lion"
    return "sgd" if "dampening" in group else config.optimizer


def _written(group: ParamGroup, config: OptimizerConfig, steps: int) -> dict[str, Any]:
    child = group["optimizer"]
    written = {key: value for key, value in group.items() if key not in ("params", "optimizer")}
    if child != config.optimizer:
        written["optimizer"] = child
    written[STEPS] = steps
    if child == "adam":
        written |= _TORCH_ADAM | {"decoupled_weight_decay": config.decoupled_weight_decay}
    if child == "sgd":
        written |= _TORCH_SGD
    if child not in MATRIX_CHILDREN:
        written["step"] = steps
    return written


def written_optimizer(
    groups: list[dict[str, Any]], *, flat: bool, scaler: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What one of Megatron's optimizers finds in a checkpoint, besides tensors.

    Args:
        groups: its groups.
        flat: whether it is one without masters, whose state dict is torch's.
        scaler: state of the loss scaler; None if there is none.
    """
    inner: dict[str, Any] = {"param_groups": groups}
    steps = groups[0].get("step")
    if steps and not HAVE_APEX_OR_TE:
        inner["state"] = {"common_step": torch.tensor(float(steps))}
    if flat:
        return inner
    written = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
    if scaler is not None:
        written["grad_scaler"] = {**scaler, "scale": torch.tensor([scaler["scale"]])}
    return written


def _optimizers(state: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    numbered = [state[key] for key in sorted(key for key in state if isinstance(key, int))]
    yield from numbered or [state]
