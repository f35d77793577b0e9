"""Draw the Newton-Schulz loads of a plan's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.plan import OwnershipPlan


def plot_loads(plans: Mapping[str, OwnershipPlan], path: Path, *, title: str) -> None:
    """Write a picture with the loads of every rank over the lower bound, one panel a domain.

    Raises:
        ConfigError: If matplotlib is missing, or the file cannot be written as a picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot {path} needs matplotlib: install it, or the extra megatron_lw[plots]"
        ) from error
    figure = Figure(figsize=(8, 3 * len(plans)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(plans), 1, squeeze=False)[:, 0]
    for panel, (domain, plan) in zip(panels, plans.items(), strict=True):
        scale = plan.bound or 1.0
        panel.stairs(plan.loads / scale, np.arange(len(plan.loads) + 1) - 0.5, fill=True)
        panel.axhline(1.0, color="black", linestyle="--", linewidth=1, label="lower bound")
        panel.axhline(
            plan.lpt_makespan / scale, color="tab:red", linewidth=1, label="longest-first makespan"
        )
        panel.set(title=domain, xlabel="rank", ylabel="load / bound", ylim=(0, None))
        panel.legend(loc="lower right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
