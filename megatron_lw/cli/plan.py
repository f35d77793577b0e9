"""`megatron-lw plan`: what a model costs on given ranks, without GPUs and without processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from megatron_lw.cli.model_file import read_model
from megatron_lw.cli.plot import plot_loads
from megatron_lw.cli.report import as_json, print_report, summarise
from megatron_lw.cli.sizes import add_layout_arguments
from megatron_lw.cli.topology import split_model
from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.plan import OwnershipPlan, plan_domain
from megatron_lw.presets import PRESETS, ModelParam, model_params, preset
from megatron_lw.topology import Topology


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="show memory, balance, padding and traffic of a model on given ranks",
        description="Plan a model: no GPU, no processes. Prints what each rank holds, computes and "
        "sends; the worst pipeline stage counts.",
    )
    parser.add_argument(
        "model", help=f"a preset ({', '.join(PRESETS)}) or a JSON list of {{name, shape, kind}}"
    )
    add_layout_arguments(parser)
    parser.add_argument(
        "--unfused",
        action="store_true",
        help="one matrix for each of q, k, v, gate and up instead of Megatron's fused ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loads of the ranks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: If the model or a size cannot be honoured.
    """
    etp = args.tp if args.etp is None else args.etp
    topology = Topology(dp=args.dp, tp=args.tp, ep=args.ep, pp=args.pp, etp=etp)
    model = _load(args.model, fused=not args.unfused, tp=args.tp)
    plans = [
        {
            domain: plan_domain(
                params,
                domain=domain,
                dp=topology.sizes_of(domain)[0],
                tp=topology.sizes_of(domain)[1],
                bucket_size=args.bucket_size,
            )
            for domain, params in stage.items()
        }
        for stage in split_model(model, topology)
    ]
    report = summarise(plans)
    if args.plot is not None:
        plot_loads(_worst_loads(plans), args.plot, title=args.model)
    if args.json:
        print(json.dumps(_echo(args, topology) | as_json(report), indent=2))
    else:
        print_report(report, title=_title(args, topology))
    return 0


def _load(model: str, *, fused: bool, tp: int) -> list[ModelParam]:
    if model in PRESETS:
        return model_params(preset(model), fused=fused, tp=tp)
    path = Path(model)
    if path.suffix != ".json" and not path.is_file():
        raise ConfigError(
            f"unknown preset {model!r}: choose one of {', '.join(PRESETS)}, or give a JSON file"
        )
    if not fused:
        raise ConfigError(f"--unfused is for presets: {model!r} lists its own matrices")
    return read_model(path)


def _worst_loads(plans: list[dict[str, OwnershipPlan]]) -> Mapping[str, OwnershipPlan]:
    """Return for each domain the plan of the stage with the largest makespan over its bound."""
    worst: dict[str, OwnershipPlan] = {}
    for stage in plans:
        for domain, plan in stage.items():
            if domain not in worst or _imbalance(plan) > _imbalance(worst[domain]):
                worst[domain] = plan
    return worst


def _imbalance(plan: OwnershipPlan) -> float:
    return plan.makespan / plan.bound if plan.bound else 0.0


def _echo(args: argparse.Namespace, topology: Topology) -> dict[str, object]:
    """Return the parameters of the call."""
    return {
        "model": args.model,
        "fused": not args.unfused,
        "dp": topology.dp,
        "tp": topology.tp,
        "ep": topology.ep,
        "pp": topology.pp,
        "etp": topology.etp,
        "expert_dp": topology.expert_dp,
        "bucket_size": args.bucket_size,
    }


def _title(args: argparse.Namespace, topology: Topology) -> str:
    form = "unfused" if args.unfused else "fused"
    sizes = ", ".join(
        f"{name} {value}"
        for name, value in _echo(args, topology).items()
        if name in ("dp", "tp", "ep", "pp", "etp", "expert_dp")
    )
    return f"{args.model} ({form}): {sizes}"
