"""`torch.distributed.checkpoint` on ranks: DTensors, read from our checkpoints and written."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from megatron_lw.dist_checkpointing.torch_reader import TorchLoadPlanner, TorchReader
from megatron_lw.dist_checkpointing.torch_writer import TorchWriter
from tests.distributed import checkpoint_cases as cases

PLACEMENTS: dict[str, Placement] = {
    "embedding": Shard(0),
    "layers.0.qkv": Shard(1),
    "layers.0.gate_up": Shard(1),
    "layers.0.proj": Shard(0),
    "layers.0.frozen": Shard(1),
    "layers.0.norm": Shard(0),
    "layers.1.gain": Replicate(),
    "layers.1.stack": Shard(2),
    "layers.1.conv": Shard(0),
}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def blank(shape: tuple[int, ...], placement: Placement, over: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.full(shape, -1.0), over, [placement])


def load_dtensors(paths: list[str]) -> list[str]:
    """Load weights and masters into DTensors; names of what is wrong, and how much was compared."""
    over, wrong, count = mesh(), [], 0
    for path in paths:
        wanted = {
            kind: {
                name: blank(cases.LOGICAL[name].shape, placement, over)
                for name, placement in PLACEMENTS.items()
            }
            for kind in ("model", "masters")
        }
        optimizer = {
            name: {"master": tensor}
            for name, tensor in wanted["masters"].items()
            if not cases.LOGICAL[name].frozen
        }
        load(
            {"model": wanted["model"], "optimizer": optimizer},
            storage_reader=TorchReader(path),
        )
        for name, placement in PLACEMENTS.items():
            expected = distribute_tensor(cases.truth(name), over, [placement]).to_local()
            for tensor in (wanted["model"][name], optimizer.get(name, {}).get("master")):
                if tensor is not None:
                    count += 1
                    if not torch.equal(tensor.to_local(), expected):
                        wrong.append(f"{name} of {path}: {tensor.to_local()}")
    return wrong or [f"{count} equal"]


def state(over: DeviceMesh) -> dict[str, object]:
    """Rows that do not divide, one that leaves ranks without any, columns, a copy, values."""
    whole = {"rows": (5, 3), "few": (1, 4), "columns": (4, 6), "copy": (3,)}
    placements = {"rows": Shard(0), "few": Shard(0), "columns": Shard(1), "copy": Replicate()}
    tensors = {
        name: distribute_tensor(
            torch.arange(torch.Size(shape).numel()).float().view(shape), over, [placements[name]]
        )
        for name, shape in whole.items()
    }
    return {"model": tensors, "step": 3, "plain": torch.arange(3)}


def save_and_load_dtensors(root: Path) -> tuple[list[int], list[int]]:
    """Write DTensors in our format, and read them back; elements that differ, by tensor."""
    over = mesh()
    written = state(over)
    save(written, storage_writer=TorchWriter(root, step=1))
    found = state(over)
    for tensor in found["model"].values():
        tensor.to_local().fill_(-1)
    found |= {"step": None, "plain": torch.zeros(3, dtype=torch.int64)}
    load(found, storage_reader=TorchReader(root), planner=TorchLoadPlanner())
    differing = [
        int((a.to_local() != b.to_local()).sum())
        for a, b in zip(written["model"].values(), found["model"].values(), strict=True)
    ]
    return differing, [found["step"], *found["plain"].tolist()]


def load_damaged(path: str) -> None:
    load(
        {"model": {"layers.0.proj": blank((7, 12), Shard(0), mesh())}},
        storage_reader=TorchReader(path),
    )
