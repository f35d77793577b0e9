"""The only module that calls `torch.distributed`.

Every function takes a `Group` explicitly, so no default process group is ever used, and counts the
call and the bytes sent in `group.traffic`. A group of one is served by local copies: the calls are
counted there too, so the sequence of collectives is the same for any world size.

Names that change between torch releases are chosen once, here: torch 2.13 deprecates
`all_gather_into_tensor` and `reduce_scatter_tensor` in favour of `*_single`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megatron_lw.distributed.group import Group
from megatron_lw.distributed.handle import Handle as Handle
from megatron_lw.distributed.handle import describe as _describe
from megatron_lw.distributed.handle import named as _named
from megatron_lw.errors import ConfigError

ReduceOp = Literal["sum", "avg", "max", "min"]
T = TypeVar("T")

_OPS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_all_gather: Callable[..., Any] = vars(dist).get("all_gather_single") or (
    dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = vars(dist).get("reduce_scatter_single") or (
    dist.reduce_scatter_tensor
)


def is_initialised() -> bool:
    """Whether `torch.distributed` has been initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def world_rank_and_size() -> tuple[int, int]:
    """This process's global rank and the world size; (0, 1) where torch.distributed is not used."""
    return (dist.get_rank(), dist.get_world_size()) if is_initialised() else (0, 1)


def adopt(name: str, handle: dist.ProcessGroup) -> Group:
    """A `Group` for a torch process group that somebody else made.

    Raises:
        ConfigError: this process is not a member of `handle`.
    """
    ranks = tuple(dist.get_process_group_ranks(handle))
    mine = dist.get_rank()
    if mine not in ranks:
        raise ConfigError(f"group {name!r}: rank {mine} is not among its ranks {ranks}")
    return Group(name, ranks, ranks.index(mine), handle)


def world_timeout() -> timedelta | None:
    """The timeout that torch.distributed was initialised with, which torch gives no other group."""
    world: Any = dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
    timeout: timedelta | None = world._get_backend(device).options._timeout
    return timeout


def create_partition(
    name: str, partition: Sequence[Sequence[int]], timeout: timedelta | None = None
) -> Group:
    """Make one process group for each part and return the one that holds this rank.

    Collective over the world: every rank must pass the same partition, in the same order. Parts of
    one rank get no process group.

    Raises:
        ConfigError: no part holds this rank.
    """
    mine, _ = world_rank_and_size()
    found: Group | None = None
    for part in partition:
        handle = dist.new_group(list(part), timeout=timeout) if len(part) > 1 else None
        if mine in part:
            found = Group(name, tuple(part), list(part).index(mine), handle)
    if found is None:
        raise ConfigError(f"group {name!r}: rank {mine} is in no part of {partition}")
    return found


def reduce_scatter_rows(
    buffer: torch.Tensor,
    group: Group,
    op: ReduceOp = "sum",
    *,
    async_op: bool = False,
    label: str = "",
) -> Handle:
    """Reduce a buffer of `group.size` equal rows over the ranks, in place into row `group.rank`.

    The other rows hold undefined values afterwards.

    Args:
        buffer: any dtype, [group.size * row_numel], contiguous.
        group: the ranks that reduce.
        op: "sum" or "avg".
        async_op: return before the result is there.
        label: what it serves, for the message if it fails.

    Collective: reduce-scatter over `group`.
    """
    row = own_row(buffer, group)
    group.traffic.add("reduce_scatter", (buffer.numel() - row.numel()) * buffer.element_size())
    if group.handle is None:
        return Handle()
    what = _describe("reduce-scatter", group, label)
    with _named(what):
        work = _reduce_scatter(row, buffer, _OPS[op], group=group.handle, async_op=async_op)
        return Handle(work, what)


def all_gather_rows(
    buffer: torch.Tensor, group: Group, *, async_op: bool = False, label: str = ""
) -> Handle:
    """Fill a buffer of `group.size` equal rows from each rank's own row, in place.

    Args:
        buffer: any dtype but float8 (send those as uint8), [group.size * row_numel], contiguous.
        group: the ranks that gather.
        async_op: return before the result is there.
        label: what it serves, for the message if it fails.

    Collective: all-gather over `group`.
    """
    row = own_row(buffer, group)
    group.traffic.add("all_gather", (group.size - 1) * row.numel() * row.element_size())
    if group.handle is None:
        return Handle()
    what = _describe("all-gather", group, label)
    with _named(what):
        return Handle(_all_gather(buffer, row, group=group.handle, async_op=async_op), what)


def all_gather(output: torch.Tensor, row: torch.Tensor, group: Group) -> None:
    """Collect each rank's row, in group order.

    Args:
        output: [group.size * row_numel], contiguous, written.
        row: any dtype that the backend knows (uint8 is one), [row_numel], contiguous.
        group: the ranks that gather.

    Collective: all-gather over `group`.
    """
    group.traffic.add("all_gather", (group.size - 1) * row.numel() * row.element_size())
    if group.handle is None:
        output.copy_(row)
        return
    with _named(_describe("all-gather", group, "")):
        _all_gather(output, row, group=group.handle)


def reduce_scatter(output: torch.Tensor, buffer: torch.Tensor, group: Group) -> None:
    """Sum a buffer of `group.size` equal rows over the ranks and keep row `group.rank`.

    Args:
        output: [row_numel], contiguous, written.
        buffer: same dtype, [group.size * row_numel], contiguous; left as it is.
        group: the ranks that reduce.

    Collective: reduce-scatter over `group`.
    """
    nbytes = (buffer.numel() - output.numel()) * buffer.element_size()
    group.traffic.add("reduce_scatter", nbytes)
    if group.handle is None:
        output.copy_(buffer)
        return
    with _named(_describe("reduce-scatter", group, "")):
        _reduce_scatter(output, buffer, group=group.handle)


def own_row(buffer: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's row of a buffer of `group.size` equal rows (a view).

    Raises:
        ConfigError: the buffer does not divide into equal rows.
    """
    row_numel, rest = divmod(buffer.numel(), group.size)
    if rest:
        raise ConfigError(
            f"a buffer of {buffer.numel()} elements has no {group.size} equal rows "
            f"(group {group.name!r})"
        )
    return buffer.view(-1).narrow(0, group.rank * row_numel, row_numel)


def all_to_all(
    output: torch.Tensor,
    input_: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: Group,
    *,
    async_op: bool = False,
    label: str = "",
) -> Handle:
    """Send a run of `input_` to each rank and receive a run of `output` from each.

    Args:
        output: [sum(output_splits)], contiguous, written.
        input_: [sum(input_splits)], contiguous, same dtype.
        output_splits: elements received from each rank of the group.
        input_splits: elements sent to each rank of the group.
        group: the ranks that exchange.
        async_op: return before the result is there.
        label: what it serves, for the message if it fails.

    Collective: all-to-all over `group`; every rank calls it, also with nothing to send.
    """
    sent = sum(input_splits) - input_splits[group.rank]
    group.traffic.add("all_to_all", sent * input_.element_size())
    if group.handle is None:
        output.copy_(input_)
        return Handle()
    what = _describe("all-to-all", group, label)
    with _named(what):
        work = dist.all_to_all_single(
            output, input_, list(output_splits), list(input_splits), group.handle, async_op
        )
    return Handle(work, what)


def send(tensor: torch.Tensor, to: int, group: Group, *, label: str = "") -> None:
    """Send a tensor to one rank of the group, which calls `recv` with as many bytes.

    On the CPU it returns when the other rank has taken the tensor: two ranks that both send first
    wait for each other until the timeout.

    Args:
        tensor: any dtype, contiguous.
        to: the receiver's rank in the group.
        group: holds both ranks.
        label: what it serves, for the message if it fails.

    Communication: point to point within `group`.

    Raises:
        ConfigError: `to` is no other rank of the group.
    """
    _require_peer(to, group)
    group.traffic.add("send", tensor.numel() * tensor.element_size())
    with _named(_describe(f"send to rank {group.ranks[to]}", group, label)):
        dist.send(tensor, group=group.handle, group_dst=to)


def recv(tensor: torch.Tensor, source: int, group: Group, *, label: str = "") -> None:
    """Receive what one rank of the group sends.

    Args:
        tensor: contiguous, of the sender's dtype and number of elements; written.
        source: the sender's rank in the group.
        group: holds both ranks.
        label: what it serves, for the message if it fails.

    Communication: point to point within `group`.

    Raises:
        ConfigError: `source` is no other rank of the group.
    """
    _require_peer(source, group)
    group.traffic.add("recv", 0)
    with _named(_describe(f"receive from rank {group.ranks[source]}", group, label)):
        dist.recv(tensor, group=group.handle, group_src=source)


def _require_peer(rank: int, group: Group) -> None:
    """Refuse a partner that does not exist; a rank has nothing to send to itself."""
    if rank == group.rank or not 0 <= rank < group.size:
        raise ConfigError(
            f"rank {rank} is no partner for rank {group.rank} of group {group.name!r}, which has "
            f"{group.size} ranks; give the rank in the group of another one"
        )


def all_reduce(
    tensor: torch.Tensor, group: Group, op: ReduceOp = "sum", *, label: str = ""
) -> None:
    """Reduce a tensor over the ranks, in place.

    Collective: all-reduce over `group`.
    """
    nbytes = 2 * (group.size - 1) * tensor.numel() * tensor.element_size() // group.size
    group.traffic.add("all_reduce", nbytes)
    if group.handle is not None:
        with _named(_describe("all-reduce", group, label)):
            dist.all_reduce(tensor, _OPS[op], group=group.handle)


def all_gather_objects(obj: Any, group: Group) -> list[Any]:
    """Each rank's object, in group order. For construction and error paths only.

    Collective: all-gather of pickled objects over `group`.
    """
    group.traffic.add("all_gather_object", 0)
    if group.handle is None:
        return [obj]
    gathered: list[Any] = [None] * group.size
    with _named(_describe("all-gather of objects", group, "")):
        dist.all_gather_object(gathered, obj, group=group.handle)
    return gathered


def gather_objects(obj: Any, group: Group) -> list[Any] | None:
    """Each rank's object, in group order, on the group's first rank; None on the others.

    Collective: gather of pickled objects to rank 0 of `group`.
    """
    group.traffic.add("gather_object", 0)
    if group.handle is None:
        return [obj]
    gathered: list[Any] | None = [None] * group.size if group.rank == 0 else None
    with _named(_describe("gather of objects", group, "")):
        dist.gather_object(obj, gathered, dst=group.ranks[0], group=group.handle)
    return gathered


def broadcast(tensor: torch.Tensor, group: Group, source: int = 0) -> None:
    """Copy a tensor of any dtype and layout from the group's rank `source` to the others, in place.

    It travels as bytes, packed; of an expanded tensor each element travels once.

    Collective: broadcast over `group`.
    """
    nbytes = tensor.numel() * tensor.element_size() if group.rank == source else 0
    group.traffic.add("broadcast", nbytes)
    if group.handle is None or tensor.numel() == 0:
        return
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    packed = tensor.contiguous()
    with _named(_describe("broadcast", group, "")):
        wire = packed.view(-1).view(torch.uint8)
        dist.broadcast(wire, src=group.ranks[source], group=group.handle)
    if packed.data_ptr() != tensor.data_ptr():
        tensor.copy_(packed)


def destroy(groups: Iterable[Group]) -> None:
    """Close the process groups of some groups, each once.

    Collective: every rank calls it, after its last collective on any of them.
    """
    for handle in {id(g.handle): g.handle for g in groups if g.handle is not None}.values():
        dist.destroy_process_group(handle)


def host_device(group: Group) -> torch.device:
    """Where a small tensor must be that this group can reduce."""
    if group.handle is not None and dist.get_backend(group.handle) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def create_control_group(world: Group, timeout: timedelta | None = None) -> Group:
    """A group of all ranks for agreeing: it waits neither for a GPU nor for reduces under way.

    It has a process group of its own, on host memory. A backward that overlaps may have started
    reduces on one rank and not on another, where a gradient did not come; on the same process group
    whatever is agreed then would meet them.

    Collective: creates a process group, if there is more than one rank.
    """
    return create_host_group("control", world, timeout)


def create_host_group(name: str, world: Group, timeout: timedelta | None = None) -> Group:
    """A group of all ranks on gloo, with a process group of its own.

    Collective: creates a process group, if there is more than one rank.
    """
    if world.handle is None:
        return world.renamed(name)
    handle = dist.new_group(list(world.ranks), timeout=timeout or world_timeout(), backend="gloo")
    return Group(name, world.ranks, world.rank, handle)
