"""Loading: match, agree, read, publish.

Whatever the layout of ranks that saved, every rank reads the boxes that it holds. Nothing is
written before all ranks have found what they ask for; the weights are published from the loaded
masters before `load` returns.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_lw.dist_checkpointing.entries import Holdings, holdings
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.dist_checkpointing.match import Match, match, require_all_used
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.reading import carry_out
from megatron_lw.dist_checkpointing.snapshot import Stateful, require_same_model
from megatron_lw.dist_checkpointing.storage import Storage
from megatron_lw.dist_checkpointing.values import Encoded
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.collectives import all_gather_objects, gather_objects
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.held import held_buckets
from megatron_lw.optimizer.param_groups import POLICIES

if TYPE_CHECKING:
    from megatron_lw.distributed.ddp import DistributedDataParallel
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


class CheckpointWarning(UserWarning):
    """Something that was saved is not loaded, or the reverse, and that is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load returns.

    Attributes:
        step: number of the checkpoint.
        directory: the checkpoint.
        extra: what was saved as `extra`; of values that differed between ranks this rank's own, and
            none where the number of ranks has changed.
        num_saved_ranks: how many ranks saved; see `extra_of_rank`.
        extra_of_rank: gives `extra` as a rank of the saving run had it.
        left_out: what `leave_out` kept from being loaded, on this rank or in the checkpoint.
    """

    step: int
    directory: Path
    extra: Mapping[str, Any]
    num_saved_ranks: int
    extra_of_rank: Callable[[int], dict[str, Any]]
    left_out: tuple[str, ...]


def load(
    path: str | Path,
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    scheduler: Stateful | None = None,
    *,
    weights_only: bool = False,
    keep_settings: bool | Collection[str] = False,
    leave_out: Collection[str] = (),
    storage: Storage | None = None,
) -> Loaded:
    """Load a checkpoint into a model and its optimizer, whatever layout of ranks wrote it.

    Args:
        path: directory of a run, whose newest checkpoint is taken, or a checkpoint.
        model: the wrapped chunk or chunks that the optimizer steps; what the weights are does not
            matter.
        optimizer: filled: masters, states, step counts, settings of the parameter groups, loss
            scale.
        scheduler: given its saved state, if one was saved.
        weights_only: load weights, frozen parameters and buffers only; states, step counts,
            settings, loss scale and scheduler stay as they are.
        keep_settings: settings of the parameter groups that stay as they are here, from the first
            step on: their names, such as "lr", or True for all.
        leave_out: what stays as it is: patterns of names, or of `name/state`; "loss_scaler" too.
        storage: where files are; the file system if None.

    Collective: gathers of small objects over `groups.control`, then one all-gather a bucket over
    its reduce group; every rank calls it.

    Raises:
        CheckpointError: on every rank: damaged files, keys that are missing or unknown, another
            logical shape or dtype. Where it is found while reading, the optimizer is broken until a
            load succeeds; before that nothing is changed.
    """
    control = optimizer.groups.control

    def open_checkpoint() -> CheckpointReader:
        require_same_model(model, optimizer)
        return CheckpointReader(path, storage)

    source = attempt(open_checkpoint, control)
    held, found = attempt(
        lambda: _match(optimizer, source, scheduler, leave_out, weights_only), control
    )
    left_out = _account(source, found, control_of=optimizer, leave_out=leave_out, only=weights_only)
    with optimizer.restoring(str(source.directory), stepped=not weights_only):
        attempt(lambda: _fill(optimizer, held, found, source, weights_only), control)
        if not weights_only:
            attempt(lambda: _set(optimizer, scheduler, source, keep_settings, leave_out), control)
    return _loaded(source, control.rank, control.size, (*found.left_out, *left_out))


def _match(
    optimizer: LayerWiseDistributedOptimizer,
    source: CheckpointReader,
    scheduler: Stateful | None,
    leave_out: Collection[str],
    weights_only: bool,
) -> tuple[Holdings, Match]:
    """All checks that one rank can make before anything is written."""
    held = holdings(optimizer)
    found = match(held, source.manifest, leave_out=leave_out, weights_only=weights_only)
    values = source.manifest.values
    if not weights_only:
        if scheduler is not None and "scheduler" not in values:
            raise CheckpointError(
                "the checkpoint has no scheduler; load without one, or start it anew"
            )
        if "loss_scaler" not in leave_out:
            trial = copy.copy(optimizer.loss_scaler)
            trial.load(source.value(_known(values, "loss_scaler")))
    return held, found


def _known(values: Mapping[str, Encoded], name: str) -> Encoded:
    if name not in values:
        raise CheckpointError(f"the checkpoint has no {name}; name it in leave_out=")
    return values[name]


def _account(
    source: CheckpointReader,
    found: Match,
    *,
    control_of: LayerWiseDistributedOptimizer,
    leave_out: Collection[str],
    only: bool,
) -> tuple[str, ...]:
    """Find what no rank asks for; warn, on the first rank, of what is dropped or new.

    Collective: a gather over `groups.control`, then an all-gather of the verdict.
    """
    control = control_of.groups.control
    gathered = gather_objects((found.used, found.dropped), control)

    def account() -> tuple[str, ...]:
        if gathered is None:
            return ()
        left_out = require_all_used(
            source.manifest, gathered, leave_out=leave_out, weights_only=only
        )
        dropped = sorted("/".join(key) for _, keys in gathered for key in keys)
        if dropped:
            _warn(
                f"states that another child kept are dropped, and start from zero: "
                f"{', '.join(dict.fromkeys(dropped))}"
            )
        if not only:
            _warn_of_groups(source.manifest, control_of.param_groups)
        return left_out

    return all_gather_objects(attempt(account, control), control)[0]  # type: ignore[no-any-return]


def _warn_of_groups(manifest: Manifest, groups: Sequence[Mapping[str, Any]]) -> None:
    present = [group["name"] for group in groups]
    new = [name for name in present if name not in manifest.groups]
    gone = [name for name in manifest.groups if name not in present]
    if new:
        _warn(f"parameter groups that were not saved keep their settings: {', '.join(new)}")
    if gone:
        _warn(f"saved parameter groups that are no more are dropped: {', '.join(gone)}")


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=2)


@torch.no_grad()
def _fill(
    optimizer: LayerWiseDistributedOptimizer,
    held: Holdings,
    found: Match,
    source: CheckpointReader,
    weights_only: bool,
) -> None:
    """Read the tensors; declared padding becomes zero."""
    buckets = held_buckets(optimizer.runtime)
    for bucket, record in zip(buckets, held.rows, strict=True):
        rows = [bucket.master.row] if weights_only else list(bucket.rows.values())
        for row in rows:
            for start, stop in record.padding:
                row[start:stop].zero_()
    for entry in found.fresh:
        entry.tensor.zero_()
    carry_out(found.reads, source.manifest, source.directory, source.storage)


def _set(
    optimizer: LayerWiseDistributedOptimizer,
    scheduler: Stateful | None,
    source: CheckpointReader,
    keep_settings: bool | Collection[str],
    leave_out: Collection[str],
) -> None:
    """Set everything that is no tensor: step counts, settings, loss scale, scheduler."""
    manifest = source.manifest
    for bucket in held_buckets(optimizer.runtime):
        saved = manifest.children.get(bucket.kind)
        if saved is not None:
            bucket.child.num_steps = saved.num_steps
            bucket.child.load_owned_values(
                {name: source.value(value) for name, value in saved.values.items()}
            )
    if keep_settings is not True:
        for group in optimizer.param_groups:
            settings = source.value(manifest.groups.get(group["name"], {"$dict": []}))
            kept = {*(keep_settings or ()), *POLICIES}
            group.update({key: value for key, value in settings.items() if key not in kept})
    if "loss_scaler" not in leave_out:
        optimizer.loss_scaler.load(source.value(manifest.values["loss_scaler"]))
    if scheduler is not None:
        scheduler.load_state_dict(source.value(manifest.values["scheduler"]))


def _loaded(source: CheckpointReader, rank: int, size: int, left_out: Sequence[str]) -> Loaded:
    manifest = source.manifest
    num_saved = manifest.topology.get("world", 1)

    def extra_of_rank(saved_rank: int) -> dict[str, Any]:
        own = manifest.values_by_rank[saved_rank] if manifest.values_by_rank else {}
        shared = source.value(manifest.values.get("extra", {}))
        return {**shared, **{key: source.value(value) for key, value in own.items()}}

    if manifest.values_by_rank and num_saved != size and rank == 0:
        names = sorted({key for values in manifest.values_by_rank for key in values})
        _warn(
            f"{num_saved} ranks saved values of their own in extra ({', '.join(names)}), and "
            f"{size} ranks load: take what is needed from extra_of_rank"
        )
    same = num_saved == size
    return Loaded(
        step=manifest.step,
        directory=source.directory,
        extra=extra_of_rank(rank) if same else source.value(manifest.values.get("extra", {})),
        num_saved_ranks=num_saved,
        extra_of_rank=extra_of_rank,
        left_out=tuple(dict.fromkeys(left_out)),
    )
