"""Which class steps whole parameters: found by its path, checked before it is used."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lw.config import OptimizerConfig
from megatron_lw.errors import ConfigError

_REGISTRY = "emerging_optimizers.registry"
_REGISTERING = (
    "emerging_optimizers.orthogonalized_optimizers",
    "emerging_optimizers.psgd",
    "emerging_optimizers.riemannian_optimizers",
    "emerging_optimizers.scalar_optimizers",
    "emerging_optimizers.soap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFactory:
    """A class with its settings; makes one optimizer a matrix.

    Attributes:
        path: what messages call it.
        optimizer: a class of torch's kind: takes a list of parameters, `lr` and the settings.
        settings: keyword arguments besides `lr`.
    """

    path: str
    optimizer: Callable[..., torch.optim.Optimizer]
    settings: Mapping[str, Any]

    def make(self, param: torch.nn.Parameter, lr: float) -> torch.optim.Optimizer:
        """An optimizer of one parameter.

        Raises:
            ConfigError: the class does not take the settings.
        """
        try:
            return self.optimizer([param], lr=lr, **self.settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"whole_settings = {dict(self.settings)!r} are not what {self.path} takes: {error}"
            ) from error


def resolve_whole(config: OptimizerConfig, child: str) -> WholeFactory:
    """Find the class that a child of `WHOLE_CHILDREN` steps with.

    Raises:
        ConfigError: it is not named, not installed, no optimizer, or one that needs a closure; it
            does not take the settings; or weight decay is asked for and it knows none.
    """
    path = "soap" if child == "soap" else config.whole_optimizer
    if path is None:
        raise ConfigError(
            f"optimizer = {child!r} needs OptimizerConfig.whole_optimizer, which is None; give the "
            "path of a class, such as 'torch.optim:Adagrad'"
        )
    found = _find(path)
    if not inspect.isclass(found) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(f"whole_optimizer = {path!r} is {found!r}, not a class of optimizers")
    accepted = inspect.signature(found).parameters
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"whole_optimizer = {path!r} needs a closure that computes the loss again, but a step "
            "comes after backward; choose another"
        )
    settings = dict(_soap_settings(config) if child == "soap" else config.whole_settings)
    if "weight_decay" in accepted:
        settings["weight_decay"] = config.weight_decay
    elif config.weight_decay > 0:
        raise ConfigError(
            f"whole_optimizer = {path!r} knows no weight decay, but OptimizerConfig.weight_decay = "
            f"{config.weight_decay}; set it to 0"
        )
    factory = WholeFactory(path=path, optimizer=found, settings=settings)
    factory.make(torch.nn.Parameter(torch.zeros(1, 1)), lr=0.0)
    return factory


def _soap_settings(config: OptimizerConfig) -> Mapping[str, Any]:
    """What megatron-core 0.19.2 passes."""
    return {
        "betas": (config.adam_beta1, config.adam_beta2),
        "shampoo_beta": config.soap_shampoo_beta,
        "use_kl_shampoo": config.soap_use_kl_shampoo,
        **dict(config.whole_settings),
    }


def _find(path: str) -> object:
    """The class at "module:Class", or of that name in the registry of emerging-optimizers."""
    try:
        if ":" in path:
            return pkgutil.resolve_name(path)
        for module in _REGISTERING:
            importlib.import_module(module)
        return importlib.import_module(_REGISTRY).get_optimizer_cls(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"whole_optimizer = {path!r} is not found ({error}); give 'module:Class', or install "
            "emerging-optimizers (Python 3.12) for a name of its registry"
        ) from error
