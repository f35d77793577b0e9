"""`Kept` and `reworded`: whatever is raised comes out as an error that travels."""

from __future__ import annotations

import pickle

import pytest

from megatron_lw.distributed.agreement import Kept
from megatron_lw.errors import (
    CommunicationError,
    ConfigError,
    InvariantError,
    LayerWiseError,
    StateError,
    reworded,
)


class TwoArguments(ConfigError):
    """A class of somebody else, which cannot be made from a text alone."""

    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name}={value}")


def kept(error: Exception) -> LayerWiseError:
    keeper = Kept()
    with keeper.keeping("stage 'x'"):
        raise error
    assert keeper.error is not None
    return keeper.error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (TwoArguments("lr", 3), ConfigError, "stage 'x': lr=3"),
        (InvariantError("no"), InvariantError, "stage 'x': no"),
        (KeyError("lr"), StateError, "stage 'x': KeyError: 'lr'"),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"), StateError, "UnicodeDecodeError"),
        (StopIteration(3), StateError, "stage 'x': StopIteration: 3"),
    ],
)
def test_what_is_kept_is_ours_names_its_cause_and_can_be_pickled(error, kind, text):
    found = kept(error)
    assert type(found) is kind and text in str(found)
    assert found.__cause__ is error
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


def test_the_first_failure_is_kept():
    keeper = Kept()
    for text in ("first", "second"):
        with keeper.keeping("here"):
            raise MemoryError(text)
    with pytest.raises(StateError, match="here: MemoryError: first"):
        keeper.raise_kept()


def test_a_failed_collective_is_not_kept_also_behind_another_exception():
    keeper = Kept()
    with pytest.raises(CommunicationError, match="all-reduce"), keeper.keeping("here"):
        raise CommunicationError("all-reduce")
    with pytest.raises(CommunicationError, match="here: ValueError: no data"):
        with keeper.keeping("here"):
            try:
                raise CommunicationError("all-reduce")
            except CommunicationError as error:
                raise ValueError("no data") from error
    with pytest.raises(CommunicationError, match="here: KeyError"), keeper.keeping("here"):
        try:
            raise CommunicationError("all-reduce")
        finally:
            {}["missing"]
    assert keeper.error is None


def test_an_interrupt_is_not_kept():
    keeper = Kept()
    with pytest.raises(KeyboardInterrupt), keeper.keeping("here"):
        raise KeyboardInterrupt
    assert keeper.error is None


def test_an_error_of_a_foreign_class_is_reworded_as_the_nearest_of_ours():
    local = type("Local", (TwoArguments,), {})("lr", 3)
    assert type(reworded(local, "text")) is ConfigError
    assert type(reworded(MemoryError(), "text")) is StateError
