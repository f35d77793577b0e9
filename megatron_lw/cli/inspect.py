"""`megatron-lw inspect`: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_lw.cli.sizes import human_size
from megatron_lw.dist_checkpointing.directory import read_manifest, resolve
from megatron_lw.dist_checkpointing.dtypes import dtype_of
from megatron_lw.dist_checkpointing.manifest import MASTER, Manifest, TensorRecord
from megatron_lw.dist_checkpointing.values import Encoded

Json = dict[str, object]
MAX_TEXT = 100
SIZES = ("world", "dp", "tp", "pp", "ep", "expert_tp", "expert_dp")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show tensors, sizes, topology and settings of a checkpoint. Reads the "
        "manifest only; `megatron-lw verify` reads the data.",
    )
    parser.add_argument("path", help="a checkpoint, or a directory of checkpoints: its newest one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        CheckpointError: If nothing committed is there, or the manifest is not whole.
    """
    directory = resolve(Path(args.path))
    manifest = read_manifest(directory)
    if args.json:
        print(json.dumps(as_json(manifest, directory), indent=2))
    else:
        _print(manifest, directory)
    return 0


def as_json(manifest: Manifest, directory: Path) -> Json:
    """Everything that the command shows, as plain JSON values."""
    files = [{"name": f.name, "rank": f.rank, "nbytes": f.nbytes} for f in manifest.files]
    params = {param.name: param for param in manifest.params}
    tensors: list[Json] = []
    for record in manifest.tensors:
        param = params.get(record.name)
        tensors.append(
            {
                "name": record.name,
                "state": record.state,
                "dtype": record.dtype,
                "shape": list(record.shape),
                "nbytes": _nbytes(record),
                "num_pieces": len(record.pieces),
                "names": list(param.names) if param else [record.name],
                "weight_dtype": param.dtype if param else None,
                "group": param.group if param else None,
            }
        )
    return {
        "path": str(directory),
        "step": manifest.step,
        "topology": dict(manifest.topology),
        "num_params": len(manifest.params),
        "nbytes": sum(file.nbytes for file in manifest.files),
        "rows": {
            "num_rows": len(manifest.rows),
            "numel": sum(row.length for row in manifest.rows),
            "padding": _padding(manifest),
        },
        "files": files,
        "tensors": tensors,
        "children": {
            name: {
                "num_steps": child.num_steps,
                "state_keys": list(child.state_keys),
                "backend": child.backend,
            }
            for name, child in manifest.children.items()
        },
        "groups": dict(manifest.groups),
        "values": dict(manifest.values),
        "values_by_rank": [dict(values) for values in manifest.values_by_rank],
    }


def _nbytes(record: TensorRecord) -> int:
    return record.numel * dtype_of(record.dtype, record.key).itemsize


def _print(manifest: Manifest, directory: Path) -> None:
    console = Console()
    sizes = [f"{name} {manifest.topology[name]}" for name in SIZES if name in manifest.topology]
    nbytes = sum(file.nbytes for file in manifest.files)
    numel = sum(row.length for row in manifest.rows)
    console.print(
        f"step {manifest.step}: {directory}", style="bold", highlight=False, soft_wrap=True
    )
    for line in (
        f"parameters {len(manifest.params)}, tensors {len(manifest.tensors)}, "
        f"data files {len(manifest.files)}, {human_size(nbytes)}",
        f"ranks: {', '.join(sizes)}",
        f"rows: {len(manifest.rows)} with {numel} elements, of which {_padding(manifest)} padding",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    for table in (_tensors(manifest), _children(manifest), _settings(manifest)):
        if table.row_count:
            console.print(table)
    others = [f"{key} = {_short(value)}" for key, value in manifest.values.items()]
    for line in others:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    ranks = len(manifest.values_by_rank)
    if ranks:
        names = sorted({name for values in manifest.values_by_rank for name in values})
        console.print(f"of each of {ranks} ranks: {', '.join(names)}", highlight=False)


def _padding(manifest: Manifest) -> int:
    return sum(stop - start for row in manifest.rows for start, stop in row.padding)


def _tensors(manifest: Manifest) -> Table:
    table = _table("tensors", ["tensor", "weight", "dtype", "shape", "size", "pieces"])
    dtypes = {param.name: param.dtype for param in manifest.params}
    for record in manifest.tensors:
        weight = dtypes.get(record.name, "") if record.state == MASTER else ""
        shape = "x".join(map(str, record.shape)) or "scalar"
        size = human_size(_nbytes(record))
        table.add_row(record.key, weight, record.dtype, shape, size, str(len(record.pieces)))
    return table


def _children(manifest: Manifest) -> Table:
    table = _table("children", ["child", "steps", "states", "kernel", "parameters"])
    count = Counter(param.child for param in manifest.params)
    for name, child in manifest.children.items():
        states = ", ".join(child.state_keys)
        kernel = child.backend or ""
        table.add_row(name, str(child.num_steps), states, kernel, str(count[name]))
    return table


def _settings(manifest: Manifest) -> Table:
    table = _table("parameter groups", ["group", "settings", "parameters"])
    count = Counter(param.group for param in manifest.params)
    for name, settings in manifest.groups.items():
        known: Mapping[str, Encoded] = settings if isinstance(settings, dict) else {"": settings}
        text = ", ".join(f"{key} {_short(value)}" for key, value in known.items())
        table.add_row(name, text, str(count[name]))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.ASCII, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _short(value: Encoded) -> str:
    """A value in one line, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
