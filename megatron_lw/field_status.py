"""What becomes of each setting: honoured, without effect, or refused with a remedy.

A configuration class keeps one table, field name -> :class:`FieldStatus`. Its constructor walks the
table instead of a ladder of ifs, and the page for users who come from Megatron is written from the
same rows, so what the page says is what the constructor does.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from typing import Any, Literal

from megatron_lw.errors import ConfigError


class IgnoredSettingWarning(UserWarning):
    """A setting was given that changes nothing here, or under a name that is on its way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The values that a setting may take."""

    text: str
    """The values in words, as they appear in a message: ``a finite number >= 0, or None``."""
    test: Callable[[object], bool]
    """True for a value that is allowed; total, so it never raises on a value of another type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStatus:
    """One row of a configuration's table."""

    status: Literal["honoured", "no_effect", "refused"]
    """Whether the setting acts, is accepted but changes nothing, or must keep its default."""
    reason: str
    """What the setting does here, or why it does nothing, or why it is refused."""
    remedy: str = ""
    """What to do instead of a refused value."""
    allowed: Allowed | None = None
    """The values of an honoured setting."""
    refused_values: tuple[tuple[object, str], ...] = ()
    """Values of an honoured setting that Megatron knows and this library refuses, with remedies."""
    harmless: tuple[object, ...] = ()
    """Values of a refused setting that pass besides the default because they ask for nothing."""
    warn: bool = False
    """Whether a setting without effect is warned about once it leaves its default."""
    differs: str = ""
    """Why the default is not Megatron's; empty where it is the same."""


def flag() -> Allowed:
    """True or False, and nothing that merely counts as one of them."""
    return Allowed(text="True or False", test=lambda value: isinstance(value, bool))


def one_of(*choices: object) -> Allowed:
    """One of the given hashable values."""
    text = ", ".join(repr(choice) for choice in choices)
    return Allowed(text=f"one of {text}", test=lambda value: value in choices)


def integer(low: int, high: int | None = None, *, optional: bool = False) -> Allowed:
    """An integer between `low` and `high`, both included.

    Args:
        low: smallest value.
        high: largest value; no limit if None.
        optional: whether None is allowed too.
    """
    text = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"

    def test(value: object) -> bool:
        if value is None:
            return optional
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return low <= value and (high is None or value <= high)

    return Allowed(text=text + (", or None" if optional else ""), test=test)


def number(
    low: float,
    below: float = math.inf,
    *,
    open_low: bool = False,
    optional: bool = False,
    infinite: bool = False,
) -> Allowed:
    """A number from `low` up to, and without, `below`; never NaN.

    Args:
        low: smallest value.
        below: upper end of the range, itself excluded.
        open_low: whether `low` itself is excluded.
        optional: whether None is allowed too.
        infinite: whether infinity is allowed too.
    """
    text = f"a{'' if infinite else ' finite'} number {'>' if open_low else '>='} {low:g}"
    if below < math.inf:
        text += f" and < {below:g}"

    def test(value: object) -> bool:
        if value is None:
            return optional
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        given = float(value)
        if not (given > low if open_low else given >= low):
            return False
        return given < below or (infinite and given == math.inf)

    return Allowed(text=text + (", or None" if optional else ""), test=test)


def honoured(
    allowed: Allowed,
    reason: str,
    *,
    refuses: Mapping[object, str] | None = None,
    differs: str = "",
) -> FieldStatus:
    """A row for a setting that acts.

    Args:
        allowed: values the setting may take.
        reason: what it does.
        refuses: values known to Megatron that are refused by name, each with its remedy.
        differs: why the default is not Megatron's.
    """
    return FieldStatus(
        status="honoured",
        reason=reason,
        allowed=allowed,
        refused_values=tuple((refuses or {}).items()),
        differs=differs,
    )


def no_effect(reason: str, *, warn: bool = False) -> FieldStatus:
    """A row for a setting that is accepted and changes nothing, warned about if `warn`."""
    return FieldStatus(status="no_effect", reason=reason, warn=warn)


def refused(reason: str, remedy: str, *, harmless: tuple[object, ...] = ()) -> FieldStatus:
    """A row for a setting that must keep its default (or one of the `harmless` values)."""
    return FieldStatus(status="refused", reason=reason, remedy=remedy, harmless=harmless)


def field_problems(config: Any, table: Mapping[str, FieldStatus]) -> list[str]:
    """Return one sentence for every field of `config` whose value its row does not allow.

    Args:
        config: instance of a dataclass, each field of which has a row in `table`.
        table: field name -> row.
    """
    problems = []
    for field in dataclasses.fields(config):
        row, value = table[field.name], attrgetter(field.name)(config)
        setting = f"{type(config).__name__}.{field.name}={value!r}"
        if row.status == "refused" and value != field.default and value not in row.harmless:
            problems.append(f"{setting} is refused: {row.reason}; {row.remedy}")
        elif row.allowed is not None and not row.allowed.test(value):
            known = [remedy for refusal, remedy in row.refused_values if refusal == value]
            problems.append(
                f"{setting} is refused: {known[0]}"
                if known
                else f"{setting} is not {row.allowed.text}; give one of these values"
            )
    return problems


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one error that lists every problem, so that a user mends them in one go.

    Raises:
        ConfigError: there is at least one problem.
    """
    listed = list(problems)
    if listed:
        raise ConfigError("\n".join(listed))


def warn_ignored(config: Any, table: Mapping[str, FieldStatus], *, stacklevel: int) -> None:
    """Warn about every setting that was given, changes nothing and says so in its row.

    Args:
        config: instance of a dataclass, each field of which has a row in `table`.
        table: field name -> row.
        stacklevel: frames from this function up to the line the warning is for, as in `warnings`.
    """
    for field in dataclasses.fields(config):
        row, value = table[field.name], attrgetter(field.name)(config)
        if row.warn and value != field.default:
            setting = f"{type(config).__name__}.{field.name}={value!r}"
            message = f"{setting} has no effect: {row.reason}"
            warnings.warn(message, IgnoredSettingWarning, stacklevel=stacklevel)


def require_known(class_name: str, table: Mapping[str, FieldStatus], names: Iterable[str]) -> None:
    """Check that every name is a field, and suggest the nearest one if it is not.

    Raises:
        ConfigError: a name is not in the table.
    """
    problems = []
    for name in names:
        if name not in table:
            near = difflib.get_close_matches(name, table, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "drop it"
            problems.append(f"{class_name} has no field {name!r}; {remedy}")
    raise_problems(problems)
