"""Loading: match, agree, read, publish.

Whatever the layout of ranks that saved, every rank reads the boxes that it holds. Nothing is
written before all ranks have found what they ask for; the weights are published from the loaded
masters before `load` returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_lw.dist_checkpointing.account import LOSS_SCALER, account
from megatron_lw.dist_checkpointing.account import CheckpointWarning as CheckpointWarning
from megatron_lw.dist_checkpointing.entries import Holdings, frozen_padding, holdings
from megatron_lw.dist_checkpointing.histories import history_entries
from megatron_lw.dist_checkpointing.history_match import Histories, match_histories, restore
from megatron_lw.dist_checkpointing.manifest import VALUE
from megatron_lw.dist_checkpointing.match import Match, gather_aliases, match
from megatron_lw.dist_checkpointing.reading import carry_out
from megatron_lw.dist_checkpointing.snapshot import (
    Stateful,
    check_patterns,
    is_named,
    require_same_model,
)
from megatron_lw.dist_checkpointing.source import Source, open_source
from megatron_lw.dist_checkpointing.storage import Storage
from megatron_lw.distributed.agreement import attempt
from megatron_lw.distributed.finalize import meet_in_reduces
from megatron_lw.errors import CheckpointError, ConfigError
from megatron_lw.optimizer.held import held_buckets
from megatron_lw.optimizer.param_groups import POLICIES

if TYPE_CHECKING:
    from megatron_lw.distributed.ddp import DistributedDataParallel
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wishes:
    """What the caller of `load` wants, see there."""

    scheduler: Stateful | None
    weights_only: bool
    keep_settings: bool | Collection[str]
    leave_out: Collection[str]


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
        weights_only: load weights with their scales, frozen parameters and buffers only; states,
            step counts, settings, loss scale and scheduler stay as they are.
        keep_settings: settings of the parameter groups that stay as they are here, from the first
            step on: their names, such as "lr", or True for all.
        leave_out: what stays as it is: patterns of names, or of `name/state`; "loss_scaler" too.
        storage: where files are; the file system if None.

    Collective: gathers of small objects over `groups.control`, after an overlapped backward the
    reduces that it has not started, then one all-gather a bucket over
    its reduce group; every rank calls it.

    Raises:
        CheckpointError: on every rank: damaged files, keys that are missing or unknown, another
            logical shape or dtype. Where it is found while reading, the optimizer is broken until a
            load succeeds; before that nothing is changed.
    """
    control = optimizer.groups.control
    wishes = _Wishes(
        scheduler=scheduler,
        weights_only=weights_only,
        keep_settings=keep_settings,
        leave_out=leave_out,
    )

    def collect() -> Holdings:
        if optimizer.saver is not None:
            optimizer.saver.join()  # else ranks might differ in which checkpoint is the newest
        require_same_model(model, optimizer)
        check_patterns("leave_out", leave_out)
        _check_kept(optimizer, keep_settings)
        return holdings(optimizer)

    held = attempt(collect, control)
    meet_in_reduces(optimizer.model_chunks, control)
    source = open_source(path, storage, control)
    aliases = gather_aliases(held, control)
    found, histories = attempt(lambda: _match(optimizer, held, source, aliases, wishes), control)
    left_out = account(
        source,
        found,
        histories,
        control,
        optimizer.param_groups,
        leave_out=leave_out,
        weights_only=weights_only,
        keep_settings=keep_settings,
    )
    extra = attempt(lambda: _extra(source, control.rank, control.size), control)
    with optimizer.restoring(str(source.directory), stepped=not weights_only):
        attempt(lambda: _fill(optimizer, held, found, histories, source, wishes), control)
        if not weights_only:
            attempt(lambda: _set(optimizer, found, source, wishes), control)
    return Loaded(
        step=source.manifest.step,
        directory=source.directory,
        extra=extra,
        num_saved_ranks=source.num_ranks,
        extra_of_rank=source.extra_of_rank,
        left_out=tuple(dict.fromkeys((*found.left_out, *histories.left_out, *left_out))),
    )


def _check_kept(
    optimizer: LayerWiseDistributedOptimizer, keep_settings: bool | Collection[str]
) -> None:
    """Raise ConfigError for a name that is no setting of any group: it would keep nothing."""
    if isinstance(keep_settings, bool):
        return
    check_patterns("keep_settings", keep_settings)
    known = {key for group in optimizer.param_groups for key in group}
    for name in keep_settings:
        if name not in known:
            raise ConfigError(
                f"keep_settings has {name!r}, which no parameter group has; they have "
                f"{', '.join(sorted(known - {'params'}))}"
            )


def _match(
    optimizer: LayerWiseDistributedOptimizer,
    held: Holdings,
    source: Source,
    aliases: Mapping[str, tuple[str, ...]],
    wishes: _Wishes,
) -> tuple[Match, Histories]:
    """All checks that one rank can make before anything is written."""
    manifest, leave_out = source.manifest, wishes.leave_out
    found = match(held, manifest, aliases, leave_out=leave_out, weights_only=wishes.weights_only)
    histories = match_histories(history_entries(optimizer), manifest, aliases, leave_out=leave_out)
    if wishes.weights_only:
        return found, histories
    kinds = dict.fromkeys(bucket.kind for bucket in held_buckets(optimizer.runtime))
    owned = {kind: _owned_values(kind, found, source) for kind in kinds}
    left_out = [
        f"{name}/{key}"
        for of_child in owned.values()
        for name, values in of_child.items()
        for key in values
        if is_named(leave_out, name, key)
    ]
    found = replace(found, left_out=(*found.left_out, *left_out), owned=owned)
    if wishes.scheduler is not None and "scheduler" not in manifest.values:
        raise CheckpointError("the checkpoint has no scheduler; load without one, or start it anew")
    if LOSS_SCALER not in leave_out:
        if LOSS_SCALER not in manifest.values:
            raise CheckpointError(
                f"the checkpoint has no {LOSS_SCALER}; name it in leave_out= to do without"
            )
        trial = copy.copy(optimizer.loss_scaler)
        trial.load(source.value(manifest.values[LOSS_SCALER]))
    return found, histories


@torch.no_grad()
def _fill(
    optimizer: LayerWiseDistributedOptimizer,
    held: Holdings,
    found: Match,
    histories: Histories,
    source: Source,
    wishes: _Wishes,
) -> None:
    """Read the tensors; declared padding becomes zero."""
    buckets = held_buckets(optimizer.runtime)
    for bucket, record in zip(buckets, held.rows, strict=True):
        rows = [bucket.master.row] if wishes.weights_only else list(bucket.rows.values())
        for row in rows:
            for start, stop in record.padding:
                row[start:stop].zero_()
    for name, padding in frozen_padding(optimizer, held):
        if not is_named(wishes.leave_out, name, VALUE):
            padding.zero_()
    for entry in found.fresh:
        entry.tensor.zero_()
    reads = (*found.reads, *histories.reads)
    carry_out(reads, source.manifest, source.directory, source.storage)
    restore(histories.restores)
    read = {name for name, _ in found.used}
    for weight in held.frozen:
        if not is_named(wishes.leave_out, weight.name, VALUE):
            weight.adopt(read)


def _set(
    optimizer: LayerWiseDistributedOptimizer, found: Match, source: Source, wishes: _Wishes
) -> None:
    """Set everything that is no tensor: step counts, settings, loss scale, scheduler.

    A scheduler that sets settings when it is given its state has the last word on them.
    """
    manifest = source.manifest
    children = {id(bucket.child): bucket for bucket in held_buckets(optimizer.runtime)}
    for bucket in children.values():
        bucket.child.restart(found.restarted)
        saved = manifest.children.get(bucket.kind)
        bucket.child.num_steps = 0 if saved is None else saved.num_steps
        bucket.child.load_owned_values(
            {
                name: {k: v for k, v in values.items() if not is_named(wishes.leave_out, name, k)}
                for name, values in found.owned[bucket.kind].items()
            }
        )
    if wishes.keep_settings is not True:
        kept = {*(wishes.keep_settings or ()), *POLICIES}
        for group in optimizer.param_groups:
            settings = source.settings(group["name"])
            group.update({key: value for key, value in settings.items() if key not in kept})
    if LOSS_SCALER not in wishes.leave_out:
        optimizer.loss_scaler.load(source.value(manifest.values[LOSS_SCALER]))
    if wishes.scheduler is not None:
        wishes.scheduler.load_state_dict(source.value(manifest.values["scheduler"]))


def _owned_values(kind: str, found: Match, source: Source) -> dict[str, Mapping[str, Any]]:
    """What was saved of a child besides tensors, by the name of each parameter of this rank."""
    saved = source.manifest.children.get(kind)
    values = {} if saved is None else saved.values
    return {
        name: source.value(values[identity])
        for name, identity in found.identities.items()
        if identity in values
    }


def _extra(source: Source, rank: int, size: int) -> dict[str, Any]:
    """This rank's `extra`; only what was equal on all ranks where their number has changed."""
    if source.num_ranks == size:
        return source.extra_of_rank(rank)
    return source.shared_extra()
