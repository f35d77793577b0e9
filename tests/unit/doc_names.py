"""What the documentation may name in backticks: files, definitions, flags, commands that exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache

from megatron_lw.cli.main import COMMANDS, build_parser
from tests.unit.doc_blocks import ROOT
from tests.unit.example_modules import example

# Words that the pages use for objects, and their classes.
OBJECTS = {
    "bucket": "BucketBuffer",
    "config": "OptimizerConfig",
    "ddp": "DistributedDataParallel",
    "group": "Group",
    "groups": "ParallelGroups",
    "model": "DistributedDataParallel",
    "optimizer": "LayerWiseDistributedOptimizer",
    "plan": "OwnershipPlan",
}
# What is not ours, or not a name: as the pages mean it.
OTHERS = frozenset(
    # attributes of parameters, Megatron's or torch's
    "param.main_grad main_grad param.grad requires_grad grad_added_to_main_grad "
    "is_qkv qkv_split_shapes partition_stride linear_qkv.weight "
    # Megatron's, named as what is not there
    "ProcessGroupCollection sharded_state_dict pretrain "
    # keys of parameter groups and of the JSON list, an abbreviation, a folder, kinds of block
    "lr weight_decay config values .venv sh text python gloo torchrun megatron-lw".split()
)
# The examples that a page may start, and the modules with their command lines.
SCRIPTS = {
    "examples/pretrain_gpt.py": "settings",
    "examples/train_digits.py": "train_digits",
}
_PATH = re.compile(r"[\w./-]*(?:/|\.py|\.md|\.toml)[\w./-]*(?:::\w+)?")
_CALL = re.compile(r"([A-Za-z_][\w.]*)(?:\((.*)\))?")
_SETTING = re.compile(r"(\w+)=(.+)")


@cache
def sources() -> dict[str, ast.Module]:
    """Dotted name to syntax tree of every module of the package."""
    paths = sorted((ROOT / "megatron_lw").rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in paths
    }


def definitions(tree: ast.AST) -> Iterator[str]:
    """Every name that a piece of source defines; local variables are none. Strings in quotes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f'"{node.value}"'
        for inner in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
            if isinstance(inner, ast.Assign | ast.AnnAssign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


@cache
def defined() -> frozenset[str]:
    return frozenset(name for tree in sources().values() for name in definitions(tree))


@cache
def members(class_name: str) -> frozenset[str]:
    """What an object of a class of the package has, inherited things included; empty if unknown."""
    for module, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                cls = vars(importlib.import_module(module))[class_name]
                return frozenset({*dir(cls), *definitions(node)})
    return frozenset()


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from flags(each)


@cache
def known_flags() -> frozenset[str]:
    return frozenset({*flags(build_parser()), *flags(example("settings").make_parser())})


def path_exists(span: str) -> bool:
    """Whether a path below the repository or the package exists, with the test that it names."""
    name, _, function = span.partition("::")
    for folder in (ROOT, ROOT / "megatron_lw", ROOT / "docs"):
        path = folder / name
        if path.exists():
            return not function or f"def {function}(" in path.read_text()
    return False


def command_exists(words: list[str]) -> bool:
    """Whether a command line can be run: target, script and flags exist."""
    match words:
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            return all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
        case ["megatron-lw", subcommand]:
            return any(subcommand == each.__name__.split(".")[-1] for each in COMMANDS)
        case ["megatron-lw", *arguments]:
            build_parser().parse_args(arguments)
            return True
        case ["torchrun", "--nproc-per-node", count, script, *arguments]:
            if script in SCRIPTS:
                example(SCRIPTS[script]).make_parser().parse_args(arguments)
                return count.isdigit() and path_exists(script)
            return count.isdigit() and script == "quickstart.py" and not arguments
        case ["python", "-m", module, *arguments]:
            return (ROOT / module.replace(".", "/")).exists() and not arguments
    return False


def name_exists(dotted: str) -> bool:
    """Whether a dotted name is defined in the package, or can be imported from torch."""
    first, *rest = dotted.split(".")
    if first in ("torch", "nn"):
        return importable(dotted if first == "torch" else f"torch.{dotted}")
    if first == "megatron_lw":
        return importable(dotted)
    if not rest:
        return first in defined()
    known = members(OBJECTS.get(first, first))
    return rest[0] in known and all(name in defined() for name in rest[1:])


def importable(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if part not in dir(found):
                return False
            found = vars(found).get(part)
        return True
    return False


def exists(span: str) -> bool:
    """Whether what a page names in backticks exists."""
    if span in OTHERS or span in known_flags():
        return True
    words = shlex.split(span)
    if len(words) > 1 and words[0] in ("make", "megatron-lw", "torchrun", "python"):
        return command_exists(words)
    if _PATH.fullmatch(span):
        return path_exists(span)
    if span.startswith('"'):
        return span in defined()
    if setting := _SETTING.fullmatch(span):
        return setting[1] in defined()
    if call := _CALL.fullmatch(span):
        given = re.findall(r"(\w+)=", call[2] or "")
        return name_exists(call[1]) and all(name in defined() for name in given)
    return False
