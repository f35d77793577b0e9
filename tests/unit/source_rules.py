"""Rules that the package's own source keeps; `test_source_rules.py` holds it to them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lw"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

COLLECTIVES = "distributed/collectives.py"
INTEGRATIONS = "integrations/"
TRANSFORMER_ENGINE = "fp8/te.py"
PROBING = ("optimizer/describe.py", TRANSFORMER_ENGINE, INTEGRATIONS)

# Every way to torch's communication: its front, and the bindings and operators behind it.
COMMUNICATION = (
    "torch.distributed",
    "torch.ops.c10d",
    "torch.ops._c10d_functional",
    "torch._C._distributed_c10d",
)
# Free functions here compute plans and ask no other rank.
PLANNING = (
    "torch.distributed.checkpoint.default_planner.",
    "torch.distributed.checkpoint.planner_helpers.",
)
# Methods of a ProcessGroup that share no name with functions of ours.
GROUP_METHODS = frozenset(
    "allreduce allreduce_coalesced allgather allgather_coalesced allgather_into_tensor_coalesced "
    "_allgather_base _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base "
    "monitored_barrier".split()
)
# What unpickles, and what is built on it.
EXECUTING = tuple(
    "pickle _pickle pickletools cloudpickle dill joblib marshal shelve copyreg torch.load "
    "torch.save torch.serialization torch.package torch.jit.load torch.hub numpy.load".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of the package: its path below the package, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


Rule = Callable[[Source], Iterator[tuple[int, str]]]


def source(path: str, text: str) -> Source:
    return Source(path=path, text=text, tree=ast.parse(text))


@cache
def package() -> tuple[Source, ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(source(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in paths)


def within(name: str, roots: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of `roots` or lies below one."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def called(node: ast.Call) -> str:
    """The last name of what is called; empty where it has none."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, full dotted name and local name of everything imported; by strings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                local = each.asname or each.name.split(".")[0]
                yield node.lineno, each.name, local
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for each in node.names:
                yield node.lineno, f"{node.module}.{each.name}", each.asname or each.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if called(node) in ("import_module", "__import__", "find_spec"):
                yield node.lineno, str(node.args[0].value), ""


def aliases(tree: ast.Module) -> dict[str, str]:
    """Local name to full dotted name; `import a.b` binds `a` alone."""
    return {
        local: local if full.startswith(f"{local}.") else full
        for _, full, local in imported_names(tree)
    }


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The full dotted name that an expression stands for; empty where it is no imported name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        prefix = dotted(node.value, names)
        return f"{prefix}.{node.attr}" if prefix else ""
    return ""


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def communicates(name: str) -> bool:
    """Whether a dotted name is a function of torch's communication, or the default group."""
    if not within(name, COMMUNICATION) or name.startswith(PLANNING):
        return False
    parts = name.split(".")
    is_type = any(part.lstrip("_")[:1].isupper() for part in parts if part not in ("_C", "WORLD"))
    return parts[-1] == "WORLD" or not (is_type or is_module(name))


def torch_distributed(file: Source) -> Iterator[tuple[int, str]]:
    """Only collectives.py uses functions of torch.distributed; types are free to all."""
    if file.path == COLLECTIVES:
        return
    names = aliases(file.tree)
    parents = {id(node.value) for node in ast.walk(file.tree) if isinstance(node, ast.Attribute)}
    for line, full, local in imported_names(file.tree):
        if communicates(full) or (not local and within(full, COMMUNICATION)):
            yield line, f"imports {full}"
    for node in ast.walk(file.tree):
        name = dotted(node, names)
        if communicates(name) and isinstance(node, ast.Attribute):
            yield node.lineno, f"uses {name}"
        elif name in COMMUNICATION and id(node) not in parents:
            yield node.lineno, f"hands {name} on"
        elif isinstance(node, ast.Attribute) and node.attr in GROUP_METHODS:
            yield node.lineno, f"calls the group's {node.attr}"


def no_assert(file: Source) -> Iterator[tuple[int, str]]:
    """Library code raises: `python -O` removes an assert."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert"


def no_probing(file: Source) -> Iterator[tuple[int, str]]:
    """Attributes are read by name at three edges only."""
    if file.path.startswith(PROBING):
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name) and node.id in ("getattr", "hasattr", "setattr", "delattr"):
            yield node.lineno, node.id


def file_length(file: Source) -> Iterator[tuple[int, str]]:
    """A file is read in one sitting."""
    lines = len(file.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield lines, f"{lines} lines, over {MAX_FILE_LINES}"


def function_length(file: Source) -> Iterator[tuple[int, str]]:
    """A function fits a screen, docstring included."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"


def functions(body: list[ast.stmt], in_class: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Functions of a module and of its classes, with whether the first parameter is the object."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
            yield node, in_class and not static
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, in_class=True)
        elif isinstance(node, ast.If | ast.Try):
            yield from functions([*node.body, *node.orelse], in_class)


def typed(file: Source) -> Iterator[tuple[int, str]]:
    """Every parameter and result of a public function is annotated."""
    for node, bound in functions(file.tree.body):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") and not node.name.endswith("__"):
            continue
        given = node.args
        positional = [*given.posonlyargs, *given.args][1 if bound else 0 :]
        others = [*given.kwonlyargs, given.vararg, given.kwarg]
        for each in (*positional, *others):
            if each is not None and each.annotation is None:
                yield node.lineno, f"{node.name}: parameter {each.arg} has no type"
        if node.returns is None:
            yield node.lineno, f"{node.name}: the result has no type"


def transformer_engine(file: Source) -> Iterator[tuple[int, str]]:
    """Only fp8/te.py imports Transformer Engine."""
    for line, full, _ in imported_names(file.tree):
        if within(full, ("transformer_engine", "transformer_engine_torch")):
            if file.path != TRANSFORMER_ENGINE:
                yield line, f"imports {full}"


def megatron(file: Source) -> Iterator[tuple[int, str]]:
    """Only the integrations import Megatron."""
    for line, full, _ in imported_names(file.tree):
        if within(full, ("megatron",)) and not file.path.startswith(INTEGRATIONS):
            yield line, f"imports {full}"


def no_pickle(file: Source) -> Iterator[tuple[int, str]]:
    """Reading a file executes nothing: whatever can unpickle or evaluate is out of reach."""
    names = aliases(file.tree)
    for line, full, _ in imported_names(file.tree):
        if within(full, EXECUTING):
            yield line, f"imports {full}"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and within(dotted(node, names), EXECUTING):
            yield node.lineno, f"uses {dotted(node, names)}"
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "compile"):
            yield node.lineno, f"uses {node.id}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.value.lineno, "gives allow_pickle"


RULES: tuple[Rule, ...] = (
    torch_distributed,
    no_assert,
    no_probing,
    file_length,
    function_length,
    typed,
    transformer_engine,
    megatron,
    no_pickle,
)
