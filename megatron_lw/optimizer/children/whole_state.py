"""The state of an optimizer of torch's kind that has one parameter, as named tensors and values.

Such state is a dictionary of tensors, numbers and lists or dictionaries of them. Here each leaf has
a name: "exp_avg", "factors.0". Numbers that a step changes in the optimizer's group belong to the
state too; they are named "group.NAME".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_lw.optimizer.children.base import OwnedValue

_LIVE = frozenset({"params", "lr", "weight_decay"})
_IN_GROUP = "group."


class WholeState:
    """One optimizer with its parameter.

    Args:
        optimizer: freshly made, with one group of one parameter.
        param: that parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> None:
        self.optimizer = optimizer
        self._param = param
        self._initial = copy.deepcopy(dict(optimizer.state.get(param, {})))
        self._initial_group = _plain(optimizer.param_groups[0])
        self._draft: dict[str, Any] | None = None

    def restart(self) -> None:
        """Forget what was learnt: the state is that of a new optimizer."""
        self._put(copy.deepcopy(self._initial))
        self.optimizer.param_groups[0].update(self._initial_group)
        self._draft = None

    def resume(self) -> None:
        """Go on from a state that was loaded before this optimizer had made its own."""
        if self._draft is not None:
            self._put(self._draft)
            self._draft = None

    @property
    def is_made(self) -> bool:
        """Whether there is a state to read or write: the optimizer's, or a draft."""
        return self._draft is not None or bool(self.optimizer.state.get(self._param))

    def draft(self, probe: torch.optim.Optimizer) -> None:
        """Make what a step makes, to be loaded into: a state of the right names and shapes.

        Args:
            probe: another optimizer of the same class and settings, of a parameter like ours that
                has a gradient.
        """
        probe.step()
        [param] = probe.param_groups[0]["params"]
        self._draft = dict(probe.state[param])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of the state, scalars as one element."""
        return self._tensors(self._state())

    def values(self) -> dict[str, OwnedValue]:
        """Name -> what is no tensor, and numbers of the group that have changed."""
        found = {key: value for key, value in _leaves(self._state()) if _is_value(value)}
        group = _plain(self.optimizer.param_groups[0])
        changed = {k: v for k, v in group.items() if v != self._initial_group.get(k)}
        return found | {_IN_GROUP + key: value for key, value in changed.items()}

    def load_values(self, values: Mapping[str, OwnedValue]) -> None:
        """Set what `values` gave."""
        for key, value in values.items():
            if key.startswith(_IN_GROUP):
                self.optimizer.param_groups[0][key.removeprefix(_IN_GROUP)] = value
            else:
                _set(self._state(), key.split("."), value)

    def _state(self) -> dict[str, Any]:
        if self._draft is not None:
            return self._draft
        state: dict[str, Any] = self.optimizer.state[self._param]
        return state

    def _put(self, state: Mapping[str, Any]) -> None:
        self.optimizer.state.clear()
        if state:
            self.optimizer.state[self._param].update(state)

    @staticmethod
    def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = {key: value for key, value in _leaves(state) if isinstance(value, torch.Tensor)}
        return {key: value if value.ndim else value.view(1) for key, value in found.items()}


def _leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and leaves of nested dictionaries, lists and tuples."""
    if isinstance(state, Mapping):
        entries: Iterator[tuple[Any, Any]] = iter(state.items())
    elif isinstance(state, list | tuple):
        entries = enumerate(state)
    else:
        yield prefix.removesuffix("."), state
        return
    for key, value in entries:
        yield from _leaves(value, f"{prefix}{key}.")


def _set(state: Any, path: list[str], value: OwnedValue) -> None:
    key: Any = int(path[0]) if isinstance(state, list) else path[0]
    if len(path) == 1:
        state[key] = value
    else:
        _set(state[key], path[1:], value)


def _plain(group: Mapping[str, Any]) -> dict[str, OwnedValue]:
    """The numbers and texts of a group that no scheduler writes."""
    return {key: value for key, value in group.items() if key not in _LIVE and _is_value(value)}


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
