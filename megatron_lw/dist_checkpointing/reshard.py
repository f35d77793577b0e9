"""From a checkpoint to the same one in another layout of ranks, on one machine, without processes.

A run in any layout can load any checkpoint, so nobody needs this to resume. It is for what is done
once and ahead: a checkpoint whose pieces lie as the next run wants them. What is written is what a
run in the target layout would have saved, value by value and file by file; memory stays below a
limit whatever the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from mmap import mmap
from os import PathLike
from pathlib import Path

import torch

from megatron_lw.dist_checkpointing.commit import commit
from megatron_lw.dist_checkpointing.coverage import encoded_values
from megatron_lw.dist_checkpointing.data_file import LazyBlob, write_data_file
from megatron_lw.dist_checkpointing.directory import step_directory
from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.headers import HeaderEntry, file_order
from megatron_lw.dist_checkpointing.manifest import Manifest, TensorRecord
from megatron_lw.dist_checkpointing.merge import RankPart, WrittenPiece, merge
from megatron_lw.dist_checkpointing.reader import CheckpointReader, blocks
from megatron_lw.dist_checkpointing.reading import Read, carry_out, find_reads
from megatron_lw.dist_checkpointing.snapshot import EXTRA
from megatron_lw.dist_checkpointing.storage import Storage, make_directory
from megatron_lw.dist_checkpointing.target import RankTarget, TargetPlan, Wanted
from megatron_lw.dist_checkpointing.values import Encoded, tensor_names
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box
from megatron_lw.optimizer.names import natural_key
from megatron_lw.topology import Topology

FIXED_NBYTES = 64 << 20
"""Memory besides the elements under way: chunks that are checked, written and summed."""
MIN_MEMORY = 96 << 20
EXTRA_VALUES = "extra"
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def reshard(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    topology: Topology,
    *,
    bucket_size: int | None = None,
    vocab_multiple: int | None = None,
    drop_rank_values: bool = False,
    max_memory: int = 1 << 30,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint again as ranks in another layout would have saved it.

    Args:
        src: a root (its newest committed checkpoint) or a checkpoint's directory.
        dst: another root; the checkpoint keeps its step.
        topology: the target; virtual pipeline chunks are not planned.
        bucket_size: of the target, as in `DDPConfig`.
        vocab_multiple: rows of embeddings and output layers are padded to a multiple of this times
            tp, as Megatron's make_vocab_size_divisible_by does; None: as they are stored.
        drop_rank_values: leave out values of `extra` that differ between the ranks that saved,
            where the number of ranks changes.
        max_memory: bytes of tensors in memory, the buffers of reading and writing included.
        storage: how files are read and written; the file system if None.
        progress: told how many bytes are done.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: the source is not whole, the target is taken, or something cannot be
            planned without a run; it is named.
        ConfigError: the sizes do not fit together or to the model.
    """
    if max_memory < MIN_MEMORY:
        raise CheckpointError(f"max_memory = {max_memory}: give at least {MIN_MEMORY} bytes")
    reader = CheckpointReader(src, storage)
    extras = _extras(reader.manifest, topology.world, drop_rank_values)
    source = _kept(reader.manifest, extras)
    plan = TargetPlan(source, topology, bucket_size=bucket_size, vocab_multiple=vocab_multiple)
    directory = step_directory(Path(dst), source.step)
    if reader.storage.list(directory):
        raise CheckpointError(f"{directory}: is there already; reshard to another directory")
    make_directory(reader.storage, directory)
    writer = _Writer(reader, source, directory, max_memory - FIXED_NBYTES, progress)
    parts = [
        replace(writer.write(plan.rank(rank), topology), extra=extras[rank])
        for rank in range(topology.world)
    ]
    made = _with_empty(merge(parts), source)
    _require_all(made, source)
    commit(reader.storage, directory, made)
    return directory


class _Writer:
    """Writes the data files of the target's ranks, one after another."""

    def __init__(
        self,
        reader: CheckpointReader,
        source: Manifest,
        directory: Path,
        memory: int,
        progress: Progress | None,
    ) -> None:
        self._reader = reader
        self._source = source
        self._directory = directory
        # A batch is read while the end of the one before is still being written.
        self._memory = memory // 2
        self._progress = progress
        self._done = 0
        self._total = sum(record.numel * _dtype(record).itemsize for record in source.tensors)

    def write(self, target: RankTarget, topology: Topology) -> RankPart:
        """Write one rank's file; returns what the rank contributes to the manifest."""
        wanted = target.wanted
        entries = [
            HeaderEntry(each.record.key, each.box.start, each.box.shape, _dtype(each.record))
            for each in wanted
        ]
        feed = _Feed(self._made(wanted, file_order(entries)))
        blobs = [
            LazyBlob(entry=entry, make=partial(feed.take, index))
            for index, entry in enumerate(entries)
        ]
        written = write_data_file(self._reader.storage, self._directory, target.rank, blobs)
        manifest = self._source
        return RankPart(
            rank=target.rank,
            step=manifest.step,
            topology=topology.group_sizes(),
            params=target.params,
            pieces=tuple(
                WrittenPiece(
                    name=each.record.name,
                    state=each.record.state,
                    dtype=each.record.dtype,
                    shape=each.record.shape,
                    box=each.box,
                    offset=offset,
                )
                for each, offset in zip(wanted, written.offsets if written else (), strict=True)
            ),
            rows=target.rows,
            file=written.record if written else None,
            children=manifest.children,
            groups=manifest.groups,
            values={key: value for key, value in manifest.values.items() if key != EXTRA_VALUES},
            extra={},
        )

    def _made(
        self, wanted: Sequence[Wanted], order: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Position in `wanted` and elements, in order; large pieces in several parts."""
        for batch in _batches(wanted, order, self._memory):
            # Mapped, not allocated: it goes back to the system as soon as it is free.
            buffer = torch.frombuffer(mmap(-1, self._memory), dtype=torch.uint8)
            tensors: list[torch.Tensor] = []
            reads: list[Read] = []
            offset = 0
            for index, box in batch:
                record = wanted[index].record
                nbytes = math.prod(box.shape) * _dtype(record).itemsize
                raw = buffer[offset : offset + nbytes]
                tensors.append(raw.view(_dtype(record)).view(box.shape))
                reads += find_reads(record, record.shape, box, tensors[-1])
                offset += _aligned(nbytes)
            reader = self._reader
            carry_out(reads, reader.manifest, reader.directory, reader.storage)
            for (index, _), tensor in zip(batch, tensors, strict=True):
                self._done += tensor.nbytes
                yield index, tensor
                if self._progress is not None:
                    self._progress(self._done, self._total)


def _batches(
    wanted: Sequence[Wanted], order: Sequence[int], most: int
) -> Iterator[list[tuple[int, Box]]]:
    """Divide what is wanted, in order, into lists of boxes that fit into memory together."""
    batch: list[tuple[int, Box]] = []
    room = most
    for index in order:
        each = wanted[index]
        itemsize = _dtype(each.record).itemsize
        for part in blocks(each.box.shape, most // 64 * 64 // itemsize):
            nbytes = _aligned(math.prod(part.shape) * itemsize)
            if batch and nbytes > room:
                yield batch
                batch, room = [], most
            start = tuple(a + b for a, b in zip(each.box.start, part.start, strict=True))
            batch.append((index, Box(start, part.shape)))
            room -= nbytes
    if batch:
        yield batch


def _aligned(nbytes: int) -> int:
    """A size up to where the next tensor of any dtype may start."""
    return -(-nbytes // 64) * 64


class _Feed:
    """Hands out what is made, piece by piece, in the order in which it is made."""

    def __init__(self, made: Iterator[tuple[int, torch.Tensor]]) -> None:
        self._made = made
        self._next = next(made, None)

    def take(self, index: int) -> Iterator[torch.Tensor]:
        """The parts of one piece."""
        while self._next is not None and self._next[0] == index:
            _, tensor = self._next
            self._next = None
            yield tensor
            self._next = next(self._made, None)


def _extras(manifest: Manifest, world: int, drop_rank_values: bool) -> list[dict[str, Encoded]]:
    """What each rank of the target has as `extra`."""
    shared = manifest.values.get(EXTRA_VALUES, {})
    if not isinstance(shared, dict):
        raise CheckpointError(f"values[{EXTRA_VALUES!r}] is no dictionary")
    of_ranks = manifest.values_by_rank
    if len(of_ranks) == world or not of_ranks:
        return [{**shared, **(of_ranks[rank] if of_ranks else {})} for rank in range(world)]
    if not drop_rank_values:
        names = sorted({name for values in of_ranks for name in values}, key=natural_key)
        raise CheckpointError(
            f"extra[{names[0]!r}] differs between the {len(of_ranks)} ranks that saved, and cannot "
            f"be divided over {world}: pass drop_rank_values (--drop-rank-values) to leave out "
            f"{', '.join(names)}"
        )
    return [dict(shared) for _ in range(world)]


def _kept(manifest: Manifest, extras: Sequence[Mapping[str, Encoded]]) -> Manifest:
    """The source without tensors that belonged to values which are left out."""
    values = {key: value for key, value in manifest.values.items() if key != EXTRA_VALUES}
    left = replace(manifest, values=values, values_by_rank=tuple(extras))
    kept = {name for _, value in encoded_values(left) for name in tensor_names(value)}
    return replace(
        manifest,
        tensors=tuple(
            record
            for record in manifest.tensors
            if not record.name.startswith(EXTRA) or record.name in kept
        ),
    )


def _with_empty(manifest: Manifest, source: Manifest) -> Manifest:
    """Add the tensors that have neither elements nor pieces."""
    empty = [record for record in source.tensors if not record.pieces]
    tensors = sorted((*manifest.tensors, *empty), key=lambda r: (natural_key(r.name), r.state))
    return replace(manifest, tensors=tuple(tensors))


def _require_all(made: Manifest, source: Manifest) -> None:
    """Check that no tensor is left out; that each is whole is checked when it is committed."""
    kept = {record.key for record in made.tensors}
    lost = [record.key for record in source.tensors if record.key not in kept]
    if lost:
        raise CheckpointError(
            f"{lost[0]!r} has no place in the target: load it in a run of that layout instead"
        )


def _dtype(record: TensorRecord) -> torch.dtype:
    return dtype_of(record.dtype, record.key)
