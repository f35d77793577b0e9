"""Checkpoints that any other layout of ranks can read: padding-aware, pickle-free, crash-safe.

`save` and `load` are all that a training script needs. `docs/checkpoints.md` is the guide,
`docs/checkpoint-format.md` specifies the bytes.
"""

from __future__ import annotations

from megatron_lw.dist_checkpointing.directory import checkpoints, clean, latest, prune
from megatron_lw.dist_checkpointing.load import CheckpointWarning, Loaded, load
from megatron_lw.dist_checkpointing.save import save, wait
from megatron_lw.dist_checkpointing.storage import FileStorage, Storage

__all__ = [
    "CheckpointWarning",
    "FileStorage",
    "Loaded",
    "Storage",
    "checkpoints",
    "clean",
    "latest",
    "load",
    "prune",
    "save",
    "wait",
]
