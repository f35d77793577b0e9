"""What one rank can check of its own rows, weights and buckets, without asking another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_lw.distributed.buffers import GradState, WeightState
from megatron_lw.distributed.collectives import own_row
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.errors import StateError
from megatron_lw.fp8.kinds import is_quantised
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import quantise_all
from megatron_lw.optimizer.held import Held
from megatron_lw.optimizer.runtime import Runtime

OPEN_STATES = (GradState.EMPTY, GradState.ACCUMULATING, GradState.REDUCING)
"""States that a bucket may have before its step's reduce has ended, whatever other ranks have."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ANEW = "build the optimizer anew and load a checkpoint"
_BY_HAND = "the weight was changed by hand; call reload_model_params() if the change is to stay"


def local_problems(
    chunks: Sequence[DistributedDataParallel], runtime: Runtime, held: Sequence[Held]
) -> list[str]:
    """What does not hold on this rank: the first problem of each kind, named, and how many.

    Reads its rows and the weights in them; the host waits for the device twice.

    Args:
        chunks: the wrapped model chunks, no gather under way.
        runtime: what the optimizer works with.
        held: its buckets.
    """
    kinds = {
        "bindings": _bindings(chunks, runtime),
        "bucket states": _bucket_states(chunks),
        "finite masters and states": [*_finite(held), *_finite_owned(runtime)],
        "published weights": _published(chunks, held),
    }
    found = {invariant: list(problems) for invariant, problems in kinds.items()}
    return [
        f"{invariant}: {problems[0]}" + (f" (and {len(problems) - 1} more)" * (len(problems) > 1))
        for invariant, problems in found.items()
        if problems
    ]


def _bindings(chunks: Sequence[DistributedDataParallel], runtime: Runtime) -> Iterator[str]:
    if {bucket for chunk in chunks for bucket in chunk.buckets} != set(runtime.buckets):
        yield "the model was wrapped again, or another optimizer was built for it; use the newest"
    for bucket in runtime.buckets:
        try:
            bucket.check_bindings()
        except StateError as error:
            yield str(error)
    managed = {id(param) for bucket in runtime.buckets for param in bucket.params.values()}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_global_parameters(number):
            if param.requires_grad and id(param) not in managed:
                yield f"parameter {name!r} is trainable but in no bucket; {_ANEW}"


def _bucket_states(chunks: Sequence[DistributedDataParallel]) -> Iterator[str]:
    for chunk in chunks:
        for bucket in chunk.buckets:
            state = bucket.grad_state
            if bucket.weight_state is not WeightState.PUBLISHED:
                yield f"{bucket.label} has weights {bucket.weight_state.value}; {_ANEW}"
            if bucket.handle.outstanding and state is not GradState.REDUCING:
                yield f"{bucket.label} holds {state.value} while a reduce is under way; {_ANEW}"
            if chunk.finalized and state in OPEN_STATES:
                yield f"{bucket.label} holds {state.value}, but its step is finalized; {_ANEW}"


def _finite(held: Sequence[Held]) -> Iterator[str]:
    rows = [(entry, key, row) for entry in held for key, row in entry.rows.items()]
    peaks = [torch.linalg.vector_norm(row, float("inf")).isfinite() for _, _, row in rows]
    for (entry, key, row), finite in zip(rows, _read(peaks), strict=True):
        if not finite:
            index = int(torch.nonzero(~row.isfinite())[0])
            yield f"{key} of {entry.named_at(index)} is {row[index].item()}; load a checkpoint"


def _finite_owned(runtime: Runtime) -> Iterator[str]:
    """The same of states at owners, once a step has made them."""
    states = [
        state
        for child in runtime.children
        if child.num_steps > 0
        for state in child.owned_states()
        if state.tensor.is_floating_point()
    ]
    peaks = [torch.linalg.vector_norm(s.tensor, float("inf")).isfinite() for s in states]
    for state, finite in zip(states, _read(peaks), strict=True):
        if not finite:
            yield f"{state.key} of parameter {state.param!r} is not finite; load a checkpoint"


def _published(chunks: Sequence[DistributedDataParallel], held: Sequence[Held]) -> Iterator[str]:
    """Weights of this rank's rows that are not their masters in the weight's dtype."""
    newer = {bucket for chunk in chunks if chunk.masters_newer for bucket in chunk.buckets}
    entries = [entry for entry in held if entry.bucket not in newer]
    counts = [_num_unpublished(entry) for entry in entries]
    for entry, count in zip(entries, _read(counts), strict=True):
        if count:
            yield f"{_first_unpublished(entry)} ({count} elements of the row differ); {_BY_HAND}"


def _num_unpublished(entry: Held) -> torch.Tensor:
    """How many elements of this rank's row are not their masters; int64 scalar."""
    bucket, row = entry.bucket, entry.master.row
    if bucket.weights is not None:
        return torch.count_nonzero(_unequal(own_row(bucket.weights, bucket.group), row))
    count = torch.zeros((), dtype=torch.int64, device=row.device)
    for _, _, weight, master in _slots(entry):
        count += torch.count_nonzero(_unequal(weight, master))
    for _, planes, master in _matrices(entry):
        count += _num_unequal(planes, master)
    return count


def _first_unpublished(entry: Held) -> str:
    for name, start, weight, master in _slots(entry):
        wrong = torch.nonzero(_unequal(weight, master))
        if wrong.numel():
            i = int(wrong[0])
            rounded = master[i].to(weight.dtype).item()
            return (
                f"parameter {name!r}, element {start + i} is {weight[i].item()}, but its master "
                f"{master[i].item()} is {rounded} in {weight.dtype}"
            )
    for name, planes, master in _matrices(entry):
        if _num_unequal(planes, master):
            return f"parameter {name!r} has other bytes or scales than its masters give"
    return f"{entry.bucket.label} has weights in its padding"


def _matrices(entry: Held) -> Iterator[tuple[str, Planes, torch.Tensor]]:
    """Name, planes and masters of each quantised matrix that lies whole in this rank's row.

    Of one that is cut the scales need masters of other ranks; its copies are compared anyway.
    """
    slots = {name: slot for name, slot in entry.bucket.row_slots()}
    for group in entry.bucket.quantised:
        for index, (name, param) in enumerate(group.params.items()):
            slot = slots.get(name)
            if slot is not None and slot.numel == param.numel():
                part = entry.master.row[slot.row_start : slot.row_start + slot.numel]
                yield name, group.held(index), part


def _num_unequal(planes: Planes, master: torch.Tensor) -> torch.Tensor:
    """How many bytes and scales are not those of the masters; int64 scalar."""
    made = planes.with_tensors({name: t.clone() for name, t in planes.tensors().items()})
    quantise_all(master.to(torch.bfloat16), made, "keep")
    counts = [
        torch.count_nonzero(mine.view(torch.uint8) != theirs.view(torch.uint8))
        for mine, theirs in zip(made.tensors().values(), planes.tensors().values(), strict=True)
    ]
    return torch.stack(counts).sum()


def _slots(entry: Held) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
    """Name, first element, weights and masters of each parameter in this rank's row."""
    for name, slot in entry.bucket.row_slots():
        if is_quantised(entry.bucket.params[name]):
            continue
        weight = entry.bucket.params[name].detach().reshape(-1)
        yield (
            name,
            slot.param_start,
            weight[slot.param_start : slot.param_start + slot.numel],
            entry.master.row[slot.row_start : slot.row_start + slot.numel],
        )


def _unequal(weight: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Where a weight is not its master in the weight's dtype, bit by bit."""
    kind = _INTEGERS[weight.element_size()]
    return weight.view(kind) != master.to(weight.dtype).view(kind)


def _read(scalars: Sequence[torch.Tensor]) -> list[int]:
    """Numbers from the device, all at once."""
    if not scalars:
        return []
    values: list[int] = torch.stack(list(scalars)).tolist()
    return values
