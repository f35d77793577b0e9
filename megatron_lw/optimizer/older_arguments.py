"""Arguments that earlier releases of Megatron's factory took: accepted at their defaults, or named.

Sources: `megatron/core/optimizer/__init__.py` of megatron-core 0.6 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lw.errors import ConfigError

_NO_DECAY = "config_overrides={ParamKey(...): {'wd_mult': 0.0}}"
_OLDER: Mapping[str, tuple[tuple[object, ...], str]] = {
    "no_weight_decay_cond": ((None,), _NO_DECAY),
    "scale_lr_cond": ((None,), "config_overrides={ParamKey(...): {'max_lr': ...}}"),
    "lr_mult": ((1.0,), "config_overrides={ParamKey(...): {'max_lr': ...}}"),
    "default_skip_embedding_weight_decay": ((False,), _NO_DECAY),
    "layer_wise_distributed_optimizer": ((True,), "torch.optim.Muon: states are always spread"),
}


def check_older_arguments(overrides: object, older: Mapping[str, Any]) -> None:
    """Refuse what would be ignored, and name what takes its place.

    Args:
        overrides: what was given for `config_overrides`, where a condition once stood.
        older: further keywords.

    Raises:
        ConfigError: an earlier argument with a value that would have an effect.
        TypeError: a keyword that there never was.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(
            f"config_overrides is a {type(overrides).__name__}; earlier releases took "
            f"no_weight_decay_cond in this place: give {_NO_DECAY}"
        )
    for name, value in older.items():
        if name not in _OLDER:
            raise TypeError(f"get_megatron_optimizer() got an unexpected keyword argument {name!r}")
        defaults, instead = _OLDER[name]
        if value not in defaults:
            raise ConfigError(
                f"{name}={value!r} is an argument of earlier releases; give {instead} instead"
            )
