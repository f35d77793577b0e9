"""One process group as a plain record: who is in it, who we are in it, and what it has carried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_lw.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(slots=True)
class Traffic:
    """What one rank has sent over one group, counted where the collective is called.

    Attributes:
        calls: collective name -> number of calls.
        nbytes: collective name -> bytes this rank sent, by the ring algorithm's count
            (all-reduce `2 (D-1)/D` of the buffer, reduce-scatter `(D-1)/D` of the buffer,
            all-gather `(D-1)` rows, all-to-all what goes to other ranks).
        log: names of the collectives in the order of the calls, while `same_calls` wants them.
    """

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    log: list[str] | None = None

    def add(self, collective: str, nbytes: int) -> None:
        """Count one call that sent `nbytes` bytes."""
        self.calls[collective] += 1
        self.nbytes[collective] += nbytes
        if self.log is not None:
            self.log.append(collective)

    def clear(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.nbytes.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """An ordered set of ranks that communicate together.

    Attributes:
        name: the field of `ParallelGroups` it serves, e.g. "dp"; used in messages.
        ranks: global ranks in group order.
        rank: this process's index in `ranks`.
        handle: the torch process group; None only for a group of one, whose collectives are
            copies that need no communication.
        traffic: calls and bytes counted on this group.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: ProcessGroup | None
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        """Check that the record is consistent.

        Raises:
            ConfigError: `rank` is not an index of `ranks`, or a handle is missing.
        """
        if not 0 <= self.rank < len(self.ranks):
            raise ConfigError(
                f"group {self.name!r}: rank {self.rank} is not an index of ranks {self.ranks}"
            )
        if self.handle is None and len(self.ranks) > 1:
            raise ConfigError(
                f"group {self.name!r} has {len(self.ranks)} ranks but no process group; "
                "initialise torch.distributed and use ParallelGroups.create or from_torch"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def renamed(self, name: str) -> Group:
        """The same ranks under another field's name, with a traffic count of its own."""
        return Group(name, self.ranks, self.rank, self.handle)
