"""Every rank must have computed the same facts and the same plan; otherwise all raise, with a name.

Digests are compared first; only where they differ are the facts themselves gathered, to name the
first parameter that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import attrgetter

from megatron_lw.config import OptimizerConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.distributed.agreement import agree_or_raise
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError, PlanMismatchError
from megatron_lw.groups import DOMAINS, ParallelGroups
from megatron_lw.optimizer.describe import DescribedModel
from megatron_lw.optimizer.names import natural_key

Fact = tuple[str, object]
_LOCAL_SETTINGS = frozenset({"timers", "config_logger_dir", "barrier_with_L1_time"})


def agree_on_model(model: DescribedModel, groups: ParallelGroups) -> None:
    """Check that all parts and replicas of a parameter are described alike, and names are global.

    Equal local shapes and tags over the tensor-parallel ranks mean that their boxes tile the global
    parameter, since every rank derives its boxes from its place by one rule.

    Collective: all-gathers of digests over each domain's exchange group, of names over `groups.pp`
    and `groups.ep`, and of verdicts over `groups.world`.

    Raises:
        PlanMismatchError: on every rank of the world, naming the first parameter that differs, the
            two ranks and the two descriptions.
        ConfigError: on every rank of the world: a name is used for different parameters of two
            pipeline stages or of two expert-parallel ranks, or copies of a tied weight differ.
    """
    infos = model.infos
    for domain in DOMAINS:
        over = groups.domain(domain)
        facts = [(info.name, info.facts()) for info in infos if info.domain == domain]
        _agree(f"the {domain} parameters", facts, over.exchange, groups.world)
        unstepped = [(entry[0], entry) for entry in model.unstepped if entry[1] == domain]
        what = f"the frozen {domain} parameters and buffers"
        _agree(what, unstepped, over.reduce, groups.world)
    stage = {info.name for info in infos if info.tied is None}
    _require_disjoint(stage, groups.pp, "pipeline stages", groups.world)
    experts = {i.name for i in infos if i.domain == "expert" and i.ep_size == 1}
    _require_disjoint(experts, groups.ep, "expert-parallel ranks", groups.world)
    tied = [(info.tied, (info.global_shape, info.dtype, info.role)) for info in infos if info.tied]
    _agree("the copies of tied weights", sorted(tied), groups.embedding, groups.world)


def _require_disjoint(names: set[str], group: Group, what: str, world: Group) -> None:
    """Check that no name stands for different parameters on two ranks of a group."""
    problem = None
    seen: set[str] = set()
    for others in all_gather_objects(sorted(names), group):
        twice = seen.intersection(others)
        if twice:
            problem = ConfigError(
                f"the name {min(twice, key=natural_key)!r} is used on two {what}: names must be "
                "global; pass DistributedDataParallel a NameMap that tells them apart"
            )
        seen.update(others)
    agree_or_raise(problem, world)


def agree_on_plan(what: str, facts: Sequence[Fact], group: Group, world: Group) -> None:
    """Check that a plan, given as named facts, is the same on all ranks of a group.

    Collective: all-gathers over `group` and `world`.

    Raises:
        PlanMismatchError: on every rank of the world, naming the first fact that differs.
    """
    _agree(what, list(facts), group, world)


def settings_facts(config: OptimizerConfig | DDPConfig) -> list[Fact]:
    """Every setting that must be equal on all ranks, as named facts; not what only logs."""
    kind = type(config).__name__
    return [
        (f"{kind}.{name}", attrgetter(name)(config))
        for name in config.FIELD_STATUS
        if name not in _LOCAL_SETTINGS
    ]


def digest_facts(facts: Sequence[Fact]) -> str:
    """SHA-256 of named facts, stable over processes."""
    hasher = hashlib.sha256()
    for name, fact in facts:
        hasher.update(f"{name!r}={fact!r};".encode())
    return hasher.hexdigest()


def _agree(what: str, facts: Sequence[Fact], group: Group, world: Group) -> None:
    digests = all_gather_objects(digest_facts(facts), group)
    problem = None
    if len(set(digests)) > 1:
        problem = PlanMismatchError(
            _first_difference(what, all_gather_objects(facts, group), group)
        )
    agree_or_raise(problem, world)


def _first_difference(what: str, gathered: Sequence[Sequence[Fact]], group: Group) -> str:
    reference = gathered[0]
    for index, other in enumerate(gathered):
        for mine, theirs in zip(reference, other, strict=False):
            if mine != theirs:
                name = min(mine[0], theirs[0]) if mine[0] != theirs[0] else mine[0]
                return (
                    f"{what} differ between ranks {group.ranks[0]} and {group.ranks[index]} of "
                    f"group {group.name!r}; first at {name!r}: {mine} against {theirs}; build "
                    "the same model with the same settings on both"
                )
        if len(reference) != len(other):
            longer = reference if len(reference) > len(other) else other
            name = longer[min(len(reference), len(other))][0]
            return (
                f"{what} differ between ranks {group.ranks[0]} and {group.ranks[index]} of group "
                f"{group.name!r}: {len(reference)} against {len(other)} entries; "
                f"first on one rank only: {name!r}"
            )
    return f"{what} differ between ranks of group {group.name!r}"
