"""What keeps the ranks together when a stage of a step fails on one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_lw.distributed.agreement import Kept, agree_on_failure, first_problem
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.distributed.group import Group
from megatron_lw.errors import LayerWiseError, StateError, reworded
from megatron_lw.optimizer.timings import Stopwatch

_REMEDY = "build it anew and load a checkpoint"


class StepGuard:
    """Measures the stages of a step, agrees on failures, and remembers that the optimizer broke.

    Args:
        chunks: told when the optimizer breaks, since they can publish by themselves.
        control: all ranks, for agreements between hosts.
        watch: measures the stages.

    Attributes:
        broken: why nothing can go on; None while all is well.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], control: Group, watch: Stopwatch
    ) -> None:
        self.broken: str | None = None
        self._chunks = chunks
        self._control = control
        self._watch = watch

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a stage. After what nobody kept the ranks are apart: no further step then."""
        with self._watch.stage(name):
            try:
                yield
            except LayerWiseError as error:
                if self.broken is not None:
                    raise
                self.break_down(f"stage {name!r}: {error}")
                raise reworded(error, f"{self.broken}; {_REMEDY}") from error
            except BaseException as error:
                self.break_down(f"stage {name!r}: {type(error).__name__}: {error}")
                raise

    def give_up(self, kept: Kept) -> None:
        """Raise on every rank what failed on any before something was written.

        Collective: all-gather of pickled objects over `control`.

        Raises:
            LayerWiseError: of the type that the failing rank had.
        """
        with self.stage("stats"):
            for chunk in self._chunks:
                chunk.spend_gradients(discard=True)
            found = first_problem(kept.error, self._control)
        if found is not None:
            text = f"{found}; nothing was updated: mend it, repeat from zero_grad()"
            raise reworded(found, text) from kept.error

    def agree(self, failure: Exception | None, what: str) -> None:
        """Break on every rank if something failed on any.

        Args:
            failure: what failed on this rank.
            what: begins the message, such as "the step failed half-way".

        Collective: all-reduce (max) of an integer over `control`.

        Raises:
            StateError: something failed; names each rank and what it met.
        """
        if (found := agree_on_failure(failure, self._control)) is not None:
            self.break_down(found)
            raise StateError(f"{what}: {found}; {_REMEDY}") from failure

    def require_whole(self) -> None:
        """Raise StateError if the optimizer broke."""
        if self.broken is not None:
            raise StateError(
                f"the optimizer is broken since a step failed half-way: {self.broken}; {_REMEDY}"
            )

    def break_down(self, reason: str) -> None:
        """Let nothing be stepped or published any more."""
        self.broken = reason
        for chunk in self._chunks:
            chunk.broken = reason
