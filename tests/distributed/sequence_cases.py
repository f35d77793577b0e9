"""What the tests of divided sequences share: a group of all ranks, and values for each rank."""

from __future__ import annotations

import torch

from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group

SIZES = [1, 2, 3, 4]
SHAPE = (2, 3, 5)


def all_ranks() -> Group:
    _, size = collectives.world_rank_and_size()
    return collectives.create_partition("tp", [range(size)])


def group_of_one() -> Group:
    """A group of this rank alone, also in a world of several."""
    _, size = collectives.world_rank_and_size()
    return collectives.create_partition("tp", [[rank] for rank in range(size)])


def integers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def normal(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """A new tensor of the same values under other strides ("expanded": the first row repeated)."""
    if kind == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "every other":
        return torch.stack((x, x), -1)[..., 0]
    if kind == "expanded":
        return x[:, :1].expand(x.shape)
    return x.clone()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, also for dtypes that torch cannot compare."""
    a_bytes, b_bytes = (x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a_bytes, b_bytes)


def part(whole: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The rank's part of a tensor that one process holds."""
    return whole.detach().chunk(group.size, dim)[group.rank].clone()
