"""Agreeing over ranks: a check that can fail on one of them raises on all, so that none waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch

from megatron_lw.distributed.collectives import all_gather_objects, all_reduce, host_device
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CommunicationError, ConfigError, LayerWiseError, reworded

T = TypeVar("T")


class Kept:
    """The first failure of a rank that goes on, since others wait for its collectives.

    Attributes:
        error: what failed, and where; None if nothing did.
    """

    def __init__(self) -> None:
        self.error: LayerWiseError | None = None

    @contextmanager
    def keeping(self, where: str) -> Iterator[None]:
        """Keep an exception instead of raising it; not that a collective failed.

        Args:
            where: the bucket or stage, for the message.

        Raises:
            CommunicationError: a collective failed, also where something else was raised for it.
        """
        try:
            yield
        except CommunicationError:
            raise
        except Exception as error:
            known = isinstance(error, LayerWiseError)
            text = f"{where}: {error}" if known else f"{where}: {type(error).__name__}: {error}"
            if _hides_communication_error(error):
                raise CommunicationError(text) from error
            self.error = self.error or reworded(error, text)

    def raise_kept(self) -> None:
        """Raise what was kept, if anything was."""
        if self.error is not None:
            raise self.error


def _hides_communication_error(error: BaseException) -> bool:
    """Whether it was raised because of a `CommunicationError`, or while one was handled."""
    behind = error.__cause__ or error.__context__
    return behind is not None and (
        isinstance(behind, CommunicationError) or _hides_communication_error(behind)
    )


def agree_or_raise(problem: Exception | None, group: Group) -> None:
    """Raise on every rank when any rank has a problem: the lowest rank's, with its rank named.

    A check that can fail on one rank only goes through here, so that no rank is left waiting.

    Collective: all-gather of pickled objects over `group`.

    Args:
        problem: of a class that is made from a text alone.
        group: the ranks that agree.

    Raises:
        Exception: of the type that the failing rank had.
    """
    found = first_problem(problem, group)
    if found is not None:
        raise found from problem


def first_problem(problem: Exception | None, group: Group) -> Exception | None:
    """What the lowest rank with a problem has, with its rank named; None if none has one.

    Collective: all-gather of pickled objects over `group`.
    """
    problems: list[Exception | None] = all_gather_objects(problem, group)
    for rank, found in zip(group.ranks, problems, strict=True):
        if found is not None:
            return type(found)(f"[rank {rank}] {found}")
    return None


def agree_on_failure(problem: Exception | None, group: Group) -> str | None:
    """What went wrong on any rank, as text that names the rank; None if nothing did.

    Cheap where nothing did: one integer travels.

    Collective: all-reduce (max) over `group`; an all-gather of texts where a rank has a problem.
    """
    flag = torch.tensor([int(problem is not None)], dtype=torch.int32, device=host_device(group))
    all_reduce(flag, group, "max", label="agreement on failures")
    if not int(flag):
        return None
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    texts = all_gather_objects(text, group)
    return "; ".join(
        f"[rank {rank}] {found}" for rank, found in zip(group.ranks, texts, strict=True) if found
    )


def attempt(check: Callable[[], T], group: Group) -> T:
    """Run a check or construction that may fail on one rank only; it then raises on every rank.

    Collective: all-gather of pickled objects over `group`.

    Raises:
        LayerWiseError: what `check` raised, here or on another rank.
    """
    result: T | None = None
    problem: LayerWiseError | None = None
    try:
        result = check()
    except LayerWiseError as error:
        problem = reworded(error, str(error))
    except Exception as error:
        problem = ConfigError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    agree_or_raise(problem, group)
    return cast(T, result)
