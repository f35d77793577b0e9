"""What must be equal on all ranks of a group, compared by digest; only a difference is looked into.

Every decision follows from what was gathered, so the ranks of a group make the same collectives
whatever they find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_lw.distributed.checksums import by_rank, checksum, first_difference
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.agree import Fact, digest_facts

_ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Facts that must be equal on all ranks of a group.

    Attributes:
        invariant: what messages call it.
        group: the ranks on which the facts must be equal.
        facts: labels and values; cheap to compute.
        remedy: what to do where they differ.
        partial: whether a label need not be known to all ranks.
        detail: finer facts in their place, computed only where `facts` differ.
        tensors: what labels stand for, looked into for the first element that differs.
    """

    invariant: str
    group: Group
    facts: Sequence[Fact]
    remedy: str
    partial: bool = False
    detail: Callable[[], Sequence[Fact]] | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def compare(claims: Sequence[Claim] | None, over: Group) -> list[str]:
    """Compare claims that all ranks of `over` make in the same order.

    Args:
        claims: each about `over` or a part of it; None on a rank that could not compute them,
            about which then nothing is claimed.
        over: the ranks that exchange digests.

    Returns:
        A text for each claim that does not hold; on the first rank of its group only.

    Collective: one all-gather of digests over `over`; where a claim does not hold, a few more over
    its group, see `first_difference`.
    """
    mine = None if claims is None else [digest_facts(claim.facts) for claim in claims]
    digests = dict(zip(over.ranks, all_gather_objects(mine, over), strict=True))
    problems: list[str] = []
    for index, claim in enumerate(claims or ()):
        made = [digests[rank] for rank in claim.group.ranks]
        if any(digest is None for digest in made) or len({d[index] for d in made}) == 1:
            continue
        text = _difference(claim)
        if text is not None and claim.group.rank == 0:
            problems.append(text)
    return problems


def bits(tensors: Mapping[str, torch.Tensor]) -> list[Fact]:
    """One fact for each tensor: elements, dtype and checksum.

    Args:
        tensors: by label, all on one device; the host waits for it once.
    """
    if not tensors:
        return []
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()]).tolist()
    return [
        (label, (tensor.numel(), str(tensor.dtype), f"checksum {value % (1 << 64):016x}"))
        for (label, tensor), value in zip(tensors.items(), sums, strict=True)
    ]


def _difference(claim: Claim) -> str | None:
    """The first fact that differs, as text; None if none does that all ranks know.

    Collective: an all-gather of facts over the claim's group; more where a tensor is looked into.
    """
    facts = claim.facts if claim.detail is None else claim.detail()
    gathered = [dict(found) for found in all_gather_objects(list(facts), claim.group)]
    absent = () if claim.partial else (_ABSENT,)
    wrong: list[str] = []
    for label in dict.fromkeys(label for found in gathered for label in found):
        known = {found[label] for found in gathered if label in found}
        missing = absent if any(label not in found for found in gathered) else ()
        if len({*known, *missing}) > 1:
            wrong.append(label)
    if not wrong:
        return None
    values = [found.get(wrong[0], _ABSENT) for found in gathered]
    ranks = claim.group.ranks
    text = f"{claim.invariant}: {wrong[0]} differs over group {claim.group.name!r}: "
    text += by_rank([_shown(value) for value in values], ranks)
    if wrong[0] in claim.tensors and len({_kind(value) for value in values}) == 1:
        found = first_difference(claim.tensors[wrong[0]], claim.group)
        if found is not None:
            text += f", first at element {found.index}: {by_rank(found.values, ranks)}"
    if len(wrong) > 1:
        text += f" (and {len(wrong) - 1} more)"
    return f"{text}; {claim.remedy}"


def _kind(value: object) -> object:
    """Elements and dtype of a tensor's fact: only tensors of one kind can be laid side by side."""
    return value[:2] if isinstance(value, tuple) else None


def _shown(value: object) -> str:
    return str(value[-1]) if isinstance(value, tuple) else str(value)
