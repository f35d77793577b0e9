"""The scale of an FP16 run's loss: one scaler, one decision for all children.

Gradients below 2**-24 vanish in FP16, so the loss is multiplied by a scale before backward and the
gradients are divided by it before they are measured. Where a scaled gradient is not finite the step
is skipped. The rules are those of Megatron's dynamic scaler, read from its source
(`core/optimizer/grad_scaler.py`), and its defaults: start high, at 2**32; back off by half for each
overflow once `hysteresis` of them have come; double after `window` steps without one.

Every scale is a power of two, so that scaling and unscaling round nothing while the values stay
normal numbers. Nothing here communicates or asks a tensor: `update` takes the decision on which all
ranks have agreed, so that all scalers of a run are equal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from megatron_lw.config import OptimizerConfig
from megatron_lw.errors import CheckpointError, ConfigError, StateError

State = dict[str, str | int | float]

GROWTH = 2.0
BACKOFF = 0.5
MAX_SCALE = 2.0**126
"""Where growth ends: the largest scale whose inverse is a normal number in fp32."""

DEFAULT_MAX_CONSECUTIVE_SKIPS = 100
"""With the other defaults the way from 2**32 down to 1 takes 33 skips. A longer row of them is no
search for the scale, but a model whose gradients are not finite at any scale; three times that
leaves room for a higher start or hysteresis."""


class LossScaler(ABC):
    """What constant and dynamic scalers share: the scale, and the count of skips in a row."""

    __slots__ = ("_consecutive_skips", "_scale", "max_consecutive_skips")

    def __init__(self, scale: float, max_consecutive_skips: int | None) -> None:
        """Start at `scale` with no skips; None sets no limit to them."""
        self._scale = scale
        self._consecutive_skips = 0
        self.max_consecutive_skips = max_consecutive_skips
        if max_consecutive_skips is not None:
            _require_count("max_consecutive_skips", max_consecutive_skips)

    @property
    def scale(self) -> float:
        """What to multiply the loss by."""
        return self._scale

    @property
    def inverse_scale(self) -> float:
        """What to multiply the gradients by; exact."""
        return 1.0 / self._scale

    @property
    def consecutive_skips(self) -> int:
        """Steps skipped since the last one that was not."""
        return self._consecutive_skips

    def update(self, found_nonfinite: bool) -> None:
        """Take note of one step.

        Args:
            found_nonfinite: whether a gradient was not finite on any rank; the step was skipped.

        Raises:
            StateError: `max_consecutive_skips` steps in a row were skipped. The scale has been
                updated all the same, so a caller may go on and is told again at the next skip.
        """
        self._consecutive_skips = self._consecutive_skips + 1 if found_nonfinite else 0
        self._adjust(found_nonfinite)
        limit = self.max_consecutive_skips
        if limit is not None and self._consecutive_skips >= limit:
            raise StateError(
                f"gradients were not finite in {self._consecutive_skips} steps in a row "
                f"(max_consecutive_skips={limit}), the loss scale is now {self._scale:g}; "
                f"{self._remedy()}"
            )

    @abstractmethod
    def state(self) -> State:
        """What a checkpoint holds: text and numbers, by name."""

    @abstractmethod
    def load(self, state: Mapping[str, object]) -> None:
        """Take up a state that `state` returned; nothing changes where that is refused.

        Raises:
            CheckpointError: a key is missing, unknown or has an impossible value, or the state is
                that of another kind of scaler.
        """

    @abstractmethod
    def _adjust(self, found_nonfinite: bool) -> None:
        """Change the scale."""

    @abstractmethod
    def _remedy(self) -> str:
        """What to do about too many skips."""


class ConstantScaler(LossScaler):
    """A scale that never changes; 1 for a run that needs none."""

    __slots__ = ()

    def __init__(
        self,
        scale: float = 1.0,
        *,
        max_consecutive_skips: int | None = DEFAULT_MAX_CONSECUTIVE_SKIPS,
    ) -> None:
        """Scale by `scale` always.

        Args:
            scale: a power of two.
            max_consecutive_skips: skips in a row at which `update` raises; None for no limit.

        Raises:
            ConfigError: a value is out of its range.
        """
        super().__init__(_power_of_two("loss_scale", scale), max_consecutive_skips)

    def state(self) -> State:
        """The skips; the scale is a setting, and only noted."""
        return {
            "kind": "constant",
            "scale": self._scale,
            "consecutive_skips": self._consecutive_skips,
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Take up the skips; the scale stays the one that was set."""
        _check_keys(self.state(), state)
        self._consecutive_skips = _count(state, "consecutive_skips")

    def _adjust(self, found_nonfinite: bool) -> None:
        pass

    def _remedy(self) -> str:
        return "lower loss_scale, or set loss_scale=None so that it is found by itself"


class DynamicScaler(LossScaler):
    """A scale that follows what the gradients bear.

    Hysteresis is a reserve of `hysteresis` overflows, not a row of them: a step without overflow
    does not refill it, growth does. The last of the reserve lowers the scale, and so does every
    overflow after it until the scale has grown again.
    """

    __slots__ = (
        "_clean_steps",
        "_reserve",
        "hysteresis",
        "min_scale",
        "window",
    )

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
        max_consecutive_skips: int | None = DEFAULT_MAX_CONSECUTIVE_SKIPS,
    ) -> None:
        """Start at `initial_scale`.

        Args:
            initial_scale: a power of two, at least `min_scale`.
            min_scale: a power of two below which the scale never falls.
            window: steps without overflow, one after another, until the scale grows.
            hysteresis: overflows until the scale falls.
            max_consecutive_skips: skips in a row at which `update` raises; None for no limit.

        Raises:
            ConfigError: a value is out of its range.
        """
        super().__init__(_power_of_two("initial_loss_scale", initial_scale), max_consecutive_skips)
        self.min_scale = _power_of_two("min_loss_scale", min_scale)
        self.window = _require_count("loss_scale_window", window)
        self.hysteresis = _require_count("hysteresis", hysteresis)
        if min_scale > initial_scale:
            raise ConfigError(
                f"min_loss_scale={min_scale:g} is above initial_loss_scale={initial_scale:g}; "
                "lower the one or raise the other"
            )
        self._clean_steps = 0
        self._reserve = self.hysteresis

    def state(self) -> State:
        """Scale and counts.

        The three numbers that Megatron saves have its names; a `hysteresis_tracker` that has gone
        below 0 there is 0 here.
        """
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "growth_tracker": self._clean_steps,
            "hysteresis_tracker": self._reserve,
            "consecutive_skips": self._consecutive_skips,
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Take up scale and counts, under this scaler's settings.

        A scale below `min_scale` is raised to it, and a reserve above `hysteresis` lowered to it.
        """
        _check_keys(self.state(), state)
        scale = state["scale"]
        if not isinstance(scale, int | float) or not _is_power_of_two(scale):
            raise CheckpointError(
                f"loss scaler: scale={scale!r} is not a power of two from 2**-126 to 2**126; "
                "the checkpoint is damaged or not one of this scaler's"
            )
        clean_steps, reserve, skips = (
            _count(state, key)
            for key in ("growth_tracker", "hysteresis_tracker", "consecutive_skips")
        )
        self._scale = max(float(scale), self.min_scale)
        self._clean_steps = clean_steps
        self._reserve = min(reserve, self.hysteresis)
        self._consecutive_skips = skips

    def _adjust(self, found_nonfinite: bool) -> None:
        if found_nonfinite:
            self._clean_steps = 0
            self._reserve = max(self._reserve - 1, 0)
            if not self._reserve:
                self._scale = max(self._scale * BACKOFF, self.min_scale)
            return
        self._clean_steps += 1
        if self._clean_steps >= self.window:  # above it where a shorter window was loaded into
            self._clean_steps = 0
            self._reserve = self.hysteresis
            self._scale = min(self._scale * GROWTH, MAX_SCALE)

    def _remedy(self) -> str:
        return (
            "look for the cause in the model or its data, for the scale cannot fall further"
            if self._scale == self.min_scale
            else "lower initial_loss_scale, or raise max_consecutive_skips"
        )


def make_scaler(
    *,
    fp16: bool,
    loss_scale: float | None = None,
    initial_loss_scale: float = 2.0**32,
    min_loss_scale: float = 1.0,
    loss_scale_window: float = 1000,
    hysteresis: int = 2,
    max_consecutive_skips: int | None = DEFAULT_MAX_CONSECUTIVE_SKIPS,
) -> LossScaler:
    """The scaler that a configuration asks for; the names are Megatron's.

    Args:
        fp16: whether the model computes in FP16.
        loss_scale: a constant scale, whatever `fp16` is; None for the dynamic one in FP16 and a
            constant 1 otherwise.
        initial_loss_scale: where the dynamic scale starts.
        min_loss_scale: what it never falls below.
        loss_scale_window: steps without overflow until it grows; a whole number.
        hysteresis: overflows until it falls.
        max_consecutive_skips: skips in a row at which `update` raises; None for no limit.

    Raises:
        ConfigError: a value that the chosen scaler uses is out of its range.
    """
    if loss_scale is not None or not fp16:
        scale = 1.0 if loss_scale is None else loss_scale
        return ConstantScaler(scale, max_consecutive_skips=max_consecutive_skips)
    if not float(loss_scale_window).is_integer():
        raise ConfigError(f"loss_scale_window={loss_scale_window}; give a whole number of steps")
    return DynamicScaler(
        initial_scale=initial_loss_scale,
        min_scale=min_loss_scale,
        window=int(loss_scale_window),
        hysteresis=hysteresis,
        max_consecutive_skips=max_consecutive_skips,
    )


def scaler_of(config: OptimizerConfig) -> LossScaler:
    """The scaler of a run's settings; see `make_scaler`."""
    return make_scaler(
        fp16=config.fp16,
        loss_scale=config.loss_scale,
        initial_loss_scale=config.initial_loss_scale,
        min_loss_scale=config.min_loss_scale,
        loss_scale_window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _is_power_of_two(value: float) -> bool:
    """Whether a scale is a power of two, and it and its inverse are normal fp32 numbers."""
    return 1 / MAX_SCALE <= value <= MAX_SCALE and math.frexp(value)[0] == 0.5


def _power_of_two(name: str, value: float) -> float:
    if not _is_power_of_two(value):
        raise ConfigError(
            f"{name}={value} is not a power of two from 2**-126 to 2**126{_nearest(value)}; others "
            "would round when gradients are unscaled"
        )
    return float(value)


def _nearest(value: float) -> str:
    """A remark on the powers of two around a value, where there are any."""
    if not 1 / MAX_SCALE < value < MAX_SCALE:
        return ""
    exponent = math.frexp(value)[1]
    return f" (give {math.ldexp(1, exponent - 1):g} or {math.ldexp(1, exponent):g})"


def _require_count(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value}; give a whole number, 1 or more")
    return value


def _check_keys(own: State, state: Mapping[str, object]) -> None:
    """Refuse a state whose keys or kind are not those of the scaler that is to take it up."""
    kind = state.get("kind")
    if kind != own["kind"]:
        raise CheckpointError(
            f"loss scaler: the checkpoint's kind is {kind!r}, this run's {own['kind']!r}; set "
            "fp16 and loss_scale as in the saved run, or leave the scaler's state out"
        )
    for key in sorted(own.keys() ^ state.keys()):
        what = "is missing from" if key in own else "is not a key of"
        raise CheckpointError(
            f"loss scaler: {key!r} {what} the state of a {own['kind']} scaler, which has "
            f"{', '.join(own)}"
        )


def _count(state: Mapping[str, object], key: str) -> int:
    value = state[key]
    if not isinstance(value, int) or value < 0:
        raise CheckpointError(f"loss scaler: {key}={value!r}; it must be a whole number, 0 or more")
    return value
