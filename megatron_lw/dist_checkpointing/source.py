"""A checkpoint that is loaded from: the same one on every rank."""

from __future__ import annotations

import hashlib
from os import PathLike
from typing import Any

from megatron_lw.dist_checkpointing.directory import MANIFEST
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.storage import Storage, read
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.checksums import by_rank
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import CheckpointError


class Source(CheckpointReader):
    """A checkpoint that is loaded from, with its values by name."""

    @property
    def num_ranks(self) -> int:
        """How many ranks saved."""
        return self.manifest.topology.get("world", 1)

    def shared_extra(self) -> dict[str, Any]:
        """What of `extra` was equal on all ranks."""
        return dict(self.value(self.manifest.values.get("extra", {}), "extra"))

    def extra_of_rank(self, rank: int) -> dict[str, Any]:
        """The `extra` of a rank of the saving run.

        Raises:
            CheckpointError: there was no such rank, or a file is damaged.
        """
        if not 0 <= rank < self.num_ranks:
            raise CheckpointError(f"extra of rank {rank}: {self.num_ranks} ranks saved")
        own = self.manifest.values_by_rank[rank] if self.manifest.values_by_rank else {}
        return {
            **self.shared_extra(),
            **{key: self.value(value, f"extra[{key!r}]") for key, value in own.items()},
        }

    def settings(self, group: str) -> dict[str, Any]:
        """The saved settings of a parameter group; none if there was none of that name.

        Raises:
            CheckpointError: they are no dictionary.
        """
        where = f"parameter group {group!r}"
        settings = self.value(self.manifest.groups.get(group, {"$dict": []}), where)
        if not isinstance(settings, dict):
            raise CheckpointError(f"{where}: what was saved are no settings")
        return settings


def open_source(path: str | PathLike[str], storage: Storage | None, group: Group) -> Source:
    """Find a checkpoint, and check that all ranks find the same one.

    Args:
        path: directory of a run, whose newest checkpoint is taken, or a checkpoint.
        storage: where files are; the file system if None.
        group: all ranks.

    Collective: all-gathers of small objects over `group`.

    Raises:
        CheckpointError: on every rank: there is none, its manifest is damaged, or ranks see
            different ones.
    """

    def find() -> tuple[Source, str]:
        source = Source(path, storage)
        content = read(source.storage, source.directory / MANIFEST)
        digest = hashlib.sha256(content).hexdigest()[:16]
        return source, f"step {source.manifest.step} with manifest {digest}"

    source, found = attempt(find, group)
    seen = all_gather_objects(found, group)
    if len(set(seen)) > 1:
        raise CheckpointError(
            f"{path}: ranks see different checkpoints there: {by_rank(seen, group.ranks)}; give a "
            "directory that is the same on every rank"
        )
    return source
