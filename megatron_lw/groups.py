"""`ParallelGroups`: every process group by name, in one record, built once at the edge.

Rank order is Megatron's default (`tp-cp-ep-dp-pp`, the left-most fastest): for the dense part of
the model `rank = tp + T (cp + C (dp + D pp))`; for the experts, which re-divide the ranks of one
pipeline stage, `rank = etp + ET (ep + E (edp + ED pp))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Domain = Literal["dense", "expert", "replicated"]
"""Parameters that share a reduction group; "replicated" ones are copies on all ranks of a stage."""

DOMAINS: tuple[Domain, ...] = ("dense", "expert", "replicated")


@dataclass(frozen=True, slots=True)
class DomainGroups:
    """The groups that one domain works with.

    Attributes:
        reduce: ranks that hold a copy of the same local parameter and its rows: `dp`, `expert_dp`
        or
            `replicas`.
        tensor: ranks that hold the other parts of the same matrix: `tp`, `expert_tp`, or this rank.
        exchange: both together, tensor rank fastest: owners are ranks of this group.
    """

    reduce: Group
    tensor: Group
    exchange: Group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelGroups:
    """Every process group that the optimizer uses. There is no default group.

    Attributes:
        world: all ranks of the run.
        dp: data parallel with context parallel: replicas of one dense parameter.
        expert_dp: replicas of one expert parameter.
        tp: tensor parallel.
        expert_tp: tensor parallel inside an expert.
        ep: expert parallel.
        cp: context parallel.
        pp: pipeline parallel.
        tp_dp: `tp` and `dp` together: owners of dense matrices.
        expert_tp_dp: `expert_tp` and `expert_dp` together: owners of expert matrices.
        grad_stats: ranks over which the gradient norm is summed: the model's whole world.
        embedding: first and last pipeline stage, which may share a tied embedding.
        replicas: all ranks of one pipeline stage, over which parameters are replicated that other
            sharding leaves aside.
        control: all ranks, for agreements between hosts; on gloo and, as `create` makes it, over a
            process group of its own, so that they wait for no GPU and for no reduce under way.
    """

    world: Group
    dp: Group
    expert_dp: Group
    tp: Group
    expert_tp: Group
    ep: Group
    cp: Group
    pp: Group
    tp_dp: Group
    expert_tp_dp: Group
    grad_stats: Group
    embedding: Group
    replicas: Group
    control: Group

    def __post_init__(self) -> None:
        """Check that the sizes fit together.

        Raises:
            ConfigError: a group has the wrong size; it is named, with the size it should have.
        """
        _require_size(self.tp_dp, self.tp.size * self.dp.size, "tp x dp")
        _require_size(
            self.expert_tp_dp,
            self.expert_tp.size * self.expert_dp.size,
            "expert_tp x expert_dp",
        )
        stage = self.tp.size * self.dp.size
        _require_size(self.world, stage * self.pp.size, "tp x dp x pp")
        _require_size(self.grad_stats, self.world.size, "world")
        _require_size(self.control, self.world.size, "world")
        _require_size(self.replicas, stage, "tp x dp")
        experts = self.expert_tp.size * self.ep.size * self.expert_dp.size
        if experts != stage:
            raise ConfigError(
                f"expert_tp {self.expert_tp.size} x ep {self.ep.size} x expert_dp "
                f"{self.expert_dp.size} = {experts}, but a pipeline stage has {stage} ranks"
            )
        if self.dp.size % self.cp.size:
            raise ConfigError(
                f"dp ({self.dp.size} ranks) must include context parallelism ({self.cp.size})"
            )

    def sizes(self) -> dict[str, int]:
        """Name of a group -> how many ranks it has."""
        return {name: group.size for name, group in self.items()}

    def items(self) -> list[tuple[str, Group]]:
        """Each group with the name of its field."""
        names = [f.name for f in fields(self)]
        return list(zip(names, attrgetter(*names)(self), strict=True))

    def domain(self, domain: Domain) -> DomainGroups:
        """The groups of one domain."""
        if domain == "dense":
            return DomainGroups(self.dp, self.tp, self.tp_dp)
        if domain == "expert":
            return DomainGroups(self.expert_dp, self.expert_tp, self.expert_tp_dp)
        alone = Group("tensor", (self.world.ranks[self.world.rank],), 0, None)
        return DomainGroups(self.replicas, alone, self.replicas)

    def sizes_of(self, domain: Domain) -> tuple[int, int]:
        """How many ranks reduce together in a domain, and how many divide each tensor."""
        over = self.domain(domain)
        return over.reduce.size, over.tensor.size

    @classmethod
    def single(cls) -> ParallelGroups:
        """Groups of one rank each, without `torch.distributed`: one process, no communication."""
        return cls(**{f.name: Group(f.name, (0,), 0, None) for f in fields(cls)})

    @classmethod
    def create(
        cls,
        *,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        expert_tensor: int | None = None,
        timeout: timedelta | None = None,
    ) -> ParallelGroups:
        """Make all groups from an initialised `torch.distributed`; the rest is data parallel.

        Args:
            tensor: ranks that divide each dense matrix.
            context: ranks that divide each sequence.
            pipeline: number of pipeline stages.
            expert: ranks over which experts are distributed.
            expert_tensor: ranks that divide each expert matrix; `tensor` if None.
            timeout: after which a collective fails whose other ranks do not come; that of
                `init_process_group` if None.

        Collective: creates process groups; every rank of the world calls it with equal sizes.

        Raises:
            ConfigError: torch.distributed is not initialised, a size is not positive or does not
                divide the world.
        """
        if not collectives.is_initialised():
            raise ConfigError(
                "torch.distributed is not initialised: call init_process_group first, "
                "or use ParallelGroups.single() in one process"
            )
        timeout = collectives.world_timeout() if timeout is None else timeout
        _, world_size = collectives.world_rank_and_size()
        expert_tensor = tensor if expert_tensor is None else expert_tensor
        dense = {"tp": tensor, "cp": context, "dp": 0, "pp": pipeline}
        moe = {"tp": expert_tensor, "ep": expert, "dp": 0, "pp": pipeline}
        _infer(dense, "dp", world_size)
        _infer(moe, "dp", world_size)
        sources = {
            "world": (dense, ("tp", "cp", "dp", "pp")),
            "dp": (dense, ("cp", "dp")),
            "expert_dp": (moe, ("dp",)),
            "tp": (dense, ("tp",)),
            "expert_tp": (moe, ("tp",)),
            "ep": (moe, ("ep",)),
            "cp": (dense, ("cp",)),
            "pp": (dense, ("pp",)),
            "tp_dp": (dense, ("tp", "cp", "dp")),
            "expert_tp_dp": (moe, ("tp", "dp")),
        }
        made: dict[tuple[tuple[int, ...], ...], Group] = {}
        groups: dict[str, Group] = {}
        for name, (sizes, axes) in sources.items():
            partition = rank_partition(sizes, axes)
            if partition not in made:
                made[partition] = collectives.create_partition(name, partition, timeout)
            groups[name] = made[partition].renamed(name)
        ends = _embedding_partition(rank_partition(dense, ("pp",)))
        groups["embedding"] = collectives.create_partition("embedding", ends, timeout)
        groups["grad_stats"] = groups["world"].renamed("grad_stats")
        groups["replicas"] = groups["tp_dp"].renamed("replicas")
        groups["control"] = collectives.create_control_group(groups["world"], timeout)
        return cls(**groups)

    def destroy(self) -> None:
        """Close the process groups; for groups made by `create`, when a program makes new ones.

        gloo keeps threads for each process group, which wake many times a second.

        Collective: every rank calls it, after its last collective on any of the groups.
        """
        collectives.destroy(group for _, group in self.items())

    @classmethod
    def from_torch(cls, handles: Mapping[str, ProcessGroup]) -> ParallelGroups:
        """Adopt process groups that already exist.

        Args:
            handles: field name -> torch process group. Fields left out are groups of this rank
                alone, except `grad_stats` (= `world`), `replicas` and `tp_dp` (= each other, or
                `dp` where `tp` is left out), `expert_dp` / `expert_tp` / `expert_tp_dp` (= the
                dense ones where `ep` is left out).

        Raises:
            ConfigError: `world` or `dp` is missing, a name is unknown, or sizes do not fit.
        """
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(handles) - names)
        if unknown:
            raise ConfigError(
                f"unknown group {unknown[0]!r}; groups are {', '.join(sorted(names))}"
            )
        for needed in ("world", "dp"):
            if needed not in handles:
                raise ConfigError(f"group {needed!r} is missing: there is no default process group")
        groups = {name: collectives.adopt(name, handle) for name, handle in handles.items()}
        fallback = {
            "grad_stats": "world",
            "control": "world",
            "replicas": "tp_dp",
            "tp_dp": "replicas",
        }
        if "tp" not in groups or groups["tp"].size == 1:
            fallback["tp_dp"] = "dp"
        if "ep" not in groups:
            fallback |= {"expert_dp": "dp", "expert_tp": "tp", "expert_tp_dp": "tp_dp"}
        mine, _ = collectives.world_rank_and_size()
        for name in sorted(names - set(groups), key=lambda n: (n not in ("tp_dp", "tp"), n)):
            source = groups.get(fallback.get(name, ""))
            groups[name] = source.renamed(name) if source else Group(name, (mine,), 0, None)
        return cls(**groups)


def rank_partition(sizes: Mapping[str, int], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Divide ranks 0..prod(sizes)-1 into the groups that vary along `axes`.

    Args:
        sizes: axis -> size, fastest axis first.
        axes: the axes that vary inside one group.

    Returns:
        The groups, each in rank order, ordered by their first rank.
    """
    world = 1
    strides: dict[str, int] = {}
    for axis, size in sizes.items():
        strides[axis] = world
        world *= size
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        fixed = tuple(rank // strides[a] % sizes[a] for a in sizes if a not in axes)
        parts.setdefault(fixed, []).append(rank)
    return tuple(sorted(tuple(part) for part in parts.values()))


def _infer(sizes: dict[str, int], axis: str, world_size: int) -> None:
    """Set `sizes[axis]` so that all sizes multiply to the world size."""
    product = 1
    for name, size in sizes.items():
        if name == axis:
            continue
        if size < 1:
            raise ConfigError(f"parallel size {name} = {size}: must be at least 1")
        product *= size
    if world_size % product:
        given = " x ".join(f"{n} {s}" for n, s in sizes.items() if n != axis)
        raise ConfigError(f"world size {world_size} is not divisible by {given} = {product}")
    sizes[axis] = world_size // product


def _embedding_partition(pipelines: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """First and last stage of each pipeline together; every middle stage alone."""
    parts: list[tuple[int, ...]] = []
    for ranks in pipelines:
        parts.append(tuple(dict.fromkeys((ranks[0], ranks[-1]))))
        parts.extend((rank,) for rank in ranks[1:-1])
    return parts


def _require_size(group: Group, size: int, meaning: str) -> None:
    if group.size != size:
        raise ConfigError(f"group {group.name!r} has {group.size} ranks; {meaning} has {size}")
