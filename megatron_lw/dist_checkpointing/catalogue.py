"""What a checkpoint offers under the names of a model: weights, states, values.

A weight that is stepped has no bytes of its own: it is its fp32 master, cast to the weight's dtype
(decision 5 of the design). Frozen parameters and buffers are stored as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lw.dist_checkpointing.frozen import PLANES
from megatron_lw.dist_checkpointing.manifest import (
    MASTER,
    VALUE,
    Manifest,
    ParamRecord,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.snapshot import EXTRA
from megatron_lw.dist_checkpointing.values import Encoded
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.names import natural_key

STATE_DICT = "state_dict"
"""Name in `Manifest.values` under which a state dict of `torch.distributed.checkpoint` keeps what
is no tensor, as pairs of key and value; its tensors have keys of the state dict as their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight or buffer of the model.

    Attributes:
        name: global name; of a weight with several copies that of the first.
        aliases: global names of the other copies.
        dtype: in the model; what is read is cast to it.
        record: where the values are.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    record: TensorRecord


@dataclass(frozen=True, slots=True)
class Source:
    """What is behind a key of a state dict.

    Attributes:
        record: where the values are.
        dtype: as which they are offered.
    """

    record: TensorRecord
    dtype: str


def weights(manifest: Manifest) -> tuple[Weight, ...]:
    """Every weight and buffer, each logical one once, in natural order of names.

    Raises:
        CheckpointError: a stepped parameter has no master, or two weights have one name.
    """
    masters = {r.name: r for r in manifest.tensors if r.state == MASTER}
    found = [_stepped(param, masters) for param in manifest.params]
    found += [
        Weight(name=record.name, aliases=(), dtype=record.dtype, record=record)
        for record in manifest.tensors
        if record.state == VALUE and is_of_model(record)
    ]
    for name, count in Counter(n for w in found for n in (w.name, *w.aliases)).items():
        if count > 1:
            raise CheckpointError(f"{name!r} names {count} weights or buffers of the checkpoint")
    return tuple(sorted(found, key=lambda weight: natural_key(weight.name)))


def state_dict_sources(manifest: Manifest) -> dict[str, Source]:
    """Key of a state dict -> what is behind it.

    `model.NAME` is a weight, frozen parameter or buffer under each of its global names,
    `optimizer.NAME.STATE` the master or a state. A checkpoint that `torch.distributed.checkpoint`
    wrote has the keys that it was given.
    """
    if STATE_DICT in manifest.values:
        return {r.name: Source(r, r.dtype) for r in manifest.tensors if is_of_model(r)}
    found = {
        f"model.{name}": Source(weight.record, weight.dtype)
        for weight in weights(manifest)
        for name in (weight.name, *weight.aliases)
    }
    names = {param.name: param.names for param in manifest.params}
    for record in manifest.tensors:
        if record.state != VALUE:
            for name in names.get(record.name, (record.name,)):
                found[f"optimizer.{name}.{record.state}"] = Source(record, record.dtype)
    return found


def state_dict_values(manifest: Manifest) -> dict[str, Encoded]:
    """Key of a state dict -> what is no tensor: `scheduler`, `extra`, or what a key was given."""
    pairs = manifest.values.get(STATE_DICT)
    if pairs is None:
        return dict(manifest.values)
    found: dict[str, Encoded] = {}
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise CheckpointError(f"{STATE_DICT}: {pair!r} is no key with its value")
        found[pair[0]] = pair[1]
    return found


def is_of_model(record: TensorRecord) -> bool:
    """Whether a value is of the model; else it is a tensor of planes, or inside other values."""
    return not record.name.startswith((EXTRA, PLANES))


def _stepped(param: ParamRecord, masters: Mapping[str, TensorRecord]) -> Weight:
    if param.name not in masters:
        raise CheckpointError(f"parameter {param.name!r} has no '{param.name}/{MASTER}'")
    first, *others = param.names
    return Weight(name=first, aliases=tuple(others), dtype=param.dtype, record=masters[param.name])
