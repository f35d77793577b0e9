"""The errors that the library raises, all under one base.

A check that can fail on one rank agrees over its group first, then raises on every rank, so that no
rank is left waiting in a collective.
"""

from __future__ import annotations


class LayerWiseError(Exception):
    """Base of every error raised by this library."""


class ConfigError(LayerWiseError, ValueError):
    """A setting, an annotation or a model that cannot be honoured; raised at construction."""


class PlanMismatchError(LayerWiseError):
    """Ranks of one group computed different plans; names the first parameter that differs."""


class CheckpointError(LayerWiseError):
    """A checkpoint that is incomplete, damaged or does not fit the model."""


class StateError(LayerWiseError, RuntimeError):
    """A call that the present state of a bucket or of the optimizer does not allow."""


class InvariantError(StateError):
    """Something that always holds does not; names it, the parameter, the ranks and the values."""


class CommunicationError(LayerWiseError, RuntimeError):
    """A collective failed or timed out: another rank is dead, stuck or elsewhere in the program."""


class NonFiniteError(LayerWiseError, ArithmeticError):
    """A gradient or master that is not finite; names the parameter and the rank."""


class UnsupportedError(LayerWiseError, NotImplementedError):
    """An operation that a quantised weight does not have; names it, and what to do instead."""


def reworded(error: Exception, text: str) -> LayerWiseError:
    """An error with another text, of the class of this module that is nearest to that of `error`.

    A class from elsewhere may want other arguments, or be one that cannot be pickled.

    Returns:
        A new error, caused by `error`; a `StateError` if that is not a `LayerWiseError`.
    """
    kinds = (k for k in type(error).__mro__ if k.__module__ == __name__)
    kind = next((k for k in kinds if issubclass(k, LayerWiseError)), StateError)
    new = kind(text)
    new.__cause__ = error
    return new
