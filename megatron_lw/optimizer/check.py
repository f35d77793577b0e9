"""`optimizer.check()`: what always holds between steps, verified over all ranks every so often.

Copies are compared by checksums of their bits, whatever else must be equal by digests of facts. A
rank that finds something wrong goes on to the end, so that all make the same collectives; then
every rank raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_lw.distributed.agreement import agree_on_failure, attempt
from megatron_lw.distributed.buffers import GradState
from megatron_lw.distributed.calls import compare_call_counts
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.distributed.group import Group
from megatron_lw.errors import InvariantError, StateError
from megatron_lw.fp8.kinds import stored
from megatron_lw.groups import DOMAINS, Domain
from megatron_lw.optimizer.agree import Fact, settings_facts
from megatron_lw.optimizer.check_local import OPEN_STATES, local_problems
from megatron_lw.optimizer.claims import Claim, bits, compare
from megatron_lw.optimizer.held import Held, held_buckets
from megatron_lw.optimizer.plan import OwnershipPlan

if TYPE_CHECKING:
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer

_ANEW = "build the optimizer anew and load a checkpoint"
_DRIFT = (
    "a copy was written on some ranks only, or a kernel is not deterministic: load a checkpoint, "
    "or call broadcast_params() of the wrapper and then reload_model_params()"
)
_SCHEDULE = "set it by the same schedule on every rank"
_ORDER = "call zero_grad(), backward and step() alike on every rank"


def check_optimizer(optimizer: LayerWiseDistributedOptimizer, *, collectives: bool = False) -> None:
    """Check, over all ranks, what holds between two steps.

    Plans and settings are equal; the copies of every weight are equal bit by bit, and of tied and
    tensor-parallel copies their masters and states as well; buckets are in legal states, in step on
    all ranks; every weight is its master in the weight's dtype; masters and states are finite; step
    counts are equal; parameters lie in their buckets. Gathers under way are awaited first, and
    masters follow weights that were loaded, as in a step; nothing else changes.

    Cost: it reads all weights of this rank once and its rows of masters and states once or twice,
    and makes no copy of them: seconds for 1e9 weights on one CPU core, milliseconds on a GPU. The
    host waits for the device a few times.

    Args:
        optimizer: what to check.
        collectives: whether to compare, before anything else, how often each rank has made each
            collective.

    Collective: an all-gather over `groups.control` of whether a rank is inside of a step; then six
    small ones on every rank, whatever it finds: an all-gather of digests over the exchange group of
    each domain, over `groups.embedding` and over `groups.pp`, and an all-reduce of one integer over
    `groups.control`; with `collectives` an all-gather of counts over
    `groups.control` first. Where something differs, a few more over the group in which it does.

    Raises:
        InvariantError: on every rank, naming each invariant that does not hold, with the first
            parameter, the ranks and the values.
        StateError: a step failed half-way, on the ranks that know it; or on every rank: reduces may
            be under way since `overlap_grad_reduce` is on and backward has begun on one.
    """
    chunks, groups = optimizer.model_chunks, optimizer.groups
    _require_working(chunks)
    attempt(lambda: _require_between_steps(chunks), groups.control)
    if collectives:
        compare_call_counts(groups)
    for chunk in chunks:
        chunk.finish_param_sync()
        chunk.refresh_masters()
    over = [groups.domain(domain).exchange for domain in DOMAINS] + [groups.embedding, groups.pp]
    problems: list[str] = []
    claims: Sequence[Sequence[Claim] | None] = [None] * len(over)
    try:
        held = held_buckets(optimizer.runtime)
        problems += local_problems(chunks, optimizer.runtime, held)
        claims = _claims(optimizer, held)
    except Exception as error:  # the other ranks wait for this one
        problems.append(f"check() itself: {type(error).__name__}: {error}")
    for made, group in zip(claims, over, strict=True):
        problems += compare(made, group)
    mine = InvariantError("; ".join(problems)) if problems else None
    found = agree_on_failure(mine, groups.control)
    if found is not None:
        raise InvariantError(f"check() found what must not be: {found}") from mine


def _require_working(chunks: Sequence[DistributedDataParallel]) -> None:
    """Refuse, before any collective, after a failure: other ranks may be elsewhere."""
    for chunk in chunks:
        if chunk.broken is not None:
            raise StateError(f"the optimizer is broken: {chunk.broken}; {_ANEW}")


def _require_between_steps(chunks: Sequence[DistributedDataParallel]) -> None:
    """Refuse where this rank may have started reduces that others have not."""
    begun = (GradState.ACCUMULATING, GradState.REDUCING)
    for chunk in chunks:
        overlaps = chunk.ddp_config.overlap_grad_reduce
        if overlaps and any(bucket.grad_state in begun for bucket in chunk.buckets):
            raise StateError(
                "check() between backward and step() with overlap_grad_reduce: a rank may have "
                "started reduces that others have not; call it after step() or zero_grad()"
            )


def _claims(optimizer: LayerWiseDistributedOptimizer, held: Sequence[Held]) -> list[list[Claim]]:
    """What must be equal within each domain, on the stages with tied copies, and on all stages."""
    groups = optimizer.groups
    settings = _settings(optimizer)
    stage = groups.domain("dense").exchange
    tied = {i.name: f"tied weight {i.tied!r}" for i in optimizer.runtime.model.infos if i.tied}
    domains = {domain: _of_domain(optimizer, domain, held) for domain in DOMAINS}
    domains["dense"].append(_same_settings(stage, settings))
    return [
        *domains.values(),
        [_same_copies(groups.embedding, held, tied)],
        [_same_settings(groups.pp, settings), _step_counts(groups.pp, held)],
    ]


def _of_domain(
    optimizer: LayerWiseDistributedOptimizer, domain: Domain, held: Sequence[Held]
) -> list[Claim]:
    over = optimizer.groups.domain(domain)
    plan = optimizer.runtime.plans.get(domain)
    mine = [entry for entry in held if entry.domain == domain]
    replicated = {
        info.name: f"parameter {info.name!r}"
        for info in optimizer.runtime.model.infos
        if info.domain == domain and info.tp_dim is None
    }
    facts = [] if plan is None else [*_named_lines(plan), ("its digest", plan.digest())]
    return [
        Claim(invariant="plan", group=over.exchange, facts=facts, remedy=_ANEW),
        Claim(
            invariant="bucket states",
            group=over.exchange,
            facts=[(entry.bucket.label, _phase(entry)) for entry in mine],
            remedy=_ORDER,
        ),
        _step_counts(over.exchange, mine),
        _same_weights(over.reduce, mine),
        _same_copies(over.tensor, mine, replicated),
    ]


def _named_lines(plan: OwnershipPlan) -> list[Fact]:
    names = (f"parameter {param.name!r}" for param in plan.params)
    return list(zip(names, plan.facts(), strict=True))


def _settings(optimizer: LayerWiseDistributedOptimizer) -> list[Fact]:
    """All settings as text, the live ones of the parameter groups and the loss scale included."""
    facts: list[Fact] = [("loss scale", float(optimizer.get_loss_scale()))]
    for group in optimizer.param_groups:
        facts += [
            (f"{key} of parameter group {group['name']!r}", repr(value))
            for key, value in sorted(group.items())
            if key != "params"
        ]
    for config in (optimizer.config, optimizer.model_chunks[0].ddp_config):
        facts += [(name, repr(value)) for name, value in settings_facts(config)]
    return facts


def _same_settings(group: Group, settings: Sequence[Fact]) -> Claim:
    return Claim(invariant="settings", group=group, facts=settings, remedy=_SCHEDULE)


def _phase(entry: Held) -> str:
    """What must be the same on all ranks of a bucket's state.

    Before the reduce has ended it depends on a rank's own data whether a gradient has arrived.
    """
    state = entry.bucket.grad_state
    return "open to gradients" if state in OPEN_STATES else state.value


def _step_counts(group: Group, held: Sequence[Held]) -> Claim:
    counts = {f"steps of {entry.child.name}": entry.child.num_steps for entry in held}
    return Claim(
        invariant="step counts", group=group, facts=list(counts.items()), remedy=_ANEW, partial=True
    )


def _same_weights(group: Group, held: Sequence[Held]) -> Claim:
    """The copies of all weights over the reduce group: a checksum a bucket, then a parameter."""
    buckets = {
        f"{entry.bucket.label}, tensor {index}": tensor
        for entry in held
        for index, tensor in enumerate(entry.bucket.weight_tensors())
    }
    params = {label: t for entry in held for label, t in entry.bucket.stored().items()}
    return Claim(
        invariant="replicas",
        group=group,
        facts=bits(buckets) if group.size > 1 else (),
        detail=partial(bits, params),
        tensors=params,
        remedy=_DRIFT,
    )


def _same_copies(group: Group, held: Sequence[Held], labels: Mapping[str, str]) -> Claim:
    """Weights, masters and states of parameters of which the ranks of a group have copies.

    Args:
        group: ranks with the same row of the same bucket.
        held: buckets of this rank.
        labels: name of such a parameter -> what messages call it.
    """
    copies: dict[str, torch.Tensor] = {}
    for entry in held if group.size > 1 else ():
        shared = {name for name in entry.bucket.names if name in labels}
        for name in shared:
            copies |= stored(labels[name], entry.bucket.params[name])
        for name, slot in entry.bucket.row_slots():
            run = slice(slot.row_start, slot.row_start + slot.numel)
            if name in shared:
                copies |= {f"{key} of {labels[name]}": row[run] for key, row in entry.rows.items()}
    copies = {label: copies[label] for label in sorted(copies)}
    return Claim(
        invariant="replicas", group=group, facts=bits(copies), tensors=copies, remedy=_DRIFT
    )
