"""`ParallelGroups` from Megatron's process groups: those it has, and those that it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError
from megatron_lw.groups import ParallelGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Field of ParallelGroups -> field of ProcessGroupCollection. `dp` includes context parallelism.
_ADOPTED = {
    "dp": "dp_cp",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "ep": "ep",
    "expert_tp": "expt_tp",
    "expert_dp": "expt_dp",
    "tp_dp": "tp_dp_cp",
}
_NEEDED = ("dp_cp", "tp", "pp")
# What divides weights or gradients in ways that the plan knows nothing of.
_REFUSED = {
    "gtp_remat": "--gtp-weight-remat-size",
    "expt_gtp_remat": "--expert-gtp-weight-remat-size",
}


def parallel_groups(pg_collection: ProcessGroupCollection | None = None) -> ParallelGroups:
    """Every group that the optimizer uses, from Megatron's.

    Megatron's groups are adopted. Those it lacks (all ranks, owners of expert matrices, first and
    last stage where a stage in between is asked) are made by all ranks in one order.

    Args:
        pg_collection: Megatron's groups; those of `parallel_state` if None.

    Collective: all-gathers of rank lists, and the creation of process groups; every rank calls it.

    Raises:
        ConfigError: a group is missing, or divides the model in a way that is not supported.
    """
    given = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    timeout = collectives.world_timeout()
    _, world_size = collectives.world_rank_and_size()
    world = collectives.create_partition("world", [tuple(range(world_size))], timeout)
    found = _adopt(given, world)
    alone = Group("alone", (world.ranks[world.rank],), 0, None)
    groups = {name: found.get(name, alone.renamed(name)) for name in _ADOPTED}
    if "expert_dp" not in found:
        groups |= {"expert_dp": groups["dp"], "expert_tp": groups["tp"]}
    groups["tp_dp"] = _product("tp_dp", groups["tp"], groups["dp"], found, world, timeout)
    groups["expert_tp_dp"] = _product(
        "expert_tp_dp", groups["expert_tp"], groups["expert_dp"], groups, world, timeout
    )
    groups["embedding"] = _embedding(given.embd, groups["pp"], world, timeout)
    groups["world"] = world
    groups["grad_stats"] = world.renamed("grad_stats")
    groups["replicas"] = groups["tp_dp"].renamed("replicas")
    groups["control"] = collectives.create_control_group(world, timeout)
    return ParallelGroups(**{n: g.renamed(n) if g.name != n else g for n, g in groups.items()})


def _adopt(given: ProcessGroupCollection, world: Group) -> dict[str, Group]:
    for field in _NEEDED:
        if getattr(given, field) is None:
            raise ConfigError(
                f"pg_collection.{field} is None: the optimizer needs it; pass a collection that "
                "has it, or none, so that parallel_state is asked"
            )
    for field, flag in _REFUSED.items():
        group = getattr(given, field)
        if group is not None and group.size() > 1:
            raise ConfigError(
                f"pg_collection.{field} has {group.size()} ranks: weights divided by {flag} are "
                "not supported; set it to 1"
            )
    adopted: dict[str, Group] = {}
    for name, field in _ADOPTED.items():
        handle: ProcessGroup | None = getattr(given, field)
        if handle is not None:
            adopted[name] = collectives.adopt(name, handle)
    return adopted


def _product(
    name: str,
    tensor: Group,
    reduce: Group,
    known: Mapping[str, Group],
    world: Group,
    timeout: timedelta | None,
) -> Group:
    """The ranks of `tensor` and `reduce` together, tensor rank fastest: owners of matrices.

    A known group of exactly these ranks in this order is taken; every rank decides alike.

    Collective: all-gathers over `world`; creates process groups where no known group fits.
    """
    members = collectives.all_gather_objects((tensor.ranks, reduce.ranks), world)
    mine = _members(tensor.ranks, members)
    candidates = [tensor, reduce, *known.values()]
    fitting = [group for group in candidates if group.ranks == mine]
    if all(collectives.all_gather_objects(bool(fitting), world)):
        return fitting[0].renamed(name)
    parts = {_members(peers, members) for peers, _ in members}
    return collectives.create_partition(name, sorted(parts), timeout)


def _members(peers: Sequence[int], members: Sequence[tuple[Any, Any]]) -> tuple[int, ...]:
    """Ranks of the reduce groups of `peers`, which are tensor-parallel, tensor rank fastest."""
    columns = [members[peer][1] for peer in peers]
    return tuple(rank for row in zip(*columns, strict=True) for rank in row)


def _embedding(
    handle: ProcessGroup | None, pipeline: Group, world: Group, timeout: timedelta | None
) -> Group:
    """First and last stage of each pipeline; a stage in between is alone.

    Megatron's own group is taken where it is just that on every rank that is in one.

    Collective: all-gathers over `world`; creates process groups where Megatron's do not fit.
    """
    rank = world.ranks[world.rank]
    ends = tuple(dict.fromkeys((pipeline.ranks[0], pipeline.ranks[-1])))
    inside = rank in ends
    fits = not inside or (handle is not None and _ranks(handle) == ends)
    if all(collectives.all_gather_objects(fits, world)):
        if inside and handle is not None:
            return collectives.adopt("embedding", handle)
        return Group("embedding", (rank,), 0, None)
    pipelines = collectives.all_gather_objects(pipeline.ranks, world)
    return collectives.create_partition("embedding", _ends_and_middles(pipelines), timeout)


def _ends_and_middles(pipelines: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    parts: list[tuple[int, ...]] = []
    for ranks in sorted(set(pipelines)):
        parts.append(tuple(dict.fromkeys((ranks[0], ranks[-1]))))
        parts.extend((rank,) for rank in ranks[1:-1])
    return parts


def _ranks(handle: ProcessGroup) -> tuple[int, ...] | None:
    """Ranks of a group that this process may or may not be in."""
    try:
        return collectives.adopt("embedding", handle).ranks
    except ConfigError:
        return None
