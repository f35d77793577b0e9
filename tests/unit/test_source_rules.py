"""The package keeps every rule; each rule is shown sources that break it and that do not."""

from __future__ import annotations

import pytest

from tests.unit.source_rules import (
    COLLECTIVES,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    RULES,
    TRANSFORMER_ENGINE,
    Rule,
    file_length,
    function_length,
    megatron,
    no_assert,
    no_pickle,
    no_probing,
    package,
    source,
    torch_distributed,
    transformer_engine,
    typed,
)


def lines_of_function(count: int) -> str:
    return "def f() -> None:\n" + "    pass\n" * (count - 1)


# (rule, path of the file, its text): every line that ends in "# bad" must be found, and no other.
SAMPLES: list[tuple[Rule, str, str]] = [
    (torch_distributed, "x.py", "import torch.distributed as dist\ndist.all_reduce(1)  # bad\n"),
    (torch_distributed, "x.py", "import torch\nrank = torch.distributed.get_rank()  # bad\n"),
    (torch_distributed, "x.py", "from torch import distributed as d\nf = d.new_group  # bad\n"),
    (torch_distributed, "x.py", "from torch.distributed import barrier as wait  # bad\n"),
    (torch_distributed, "x.py", "import torch.distributed as dist\nvars(dist)  # bad\n"),
    (torch_distributed, "x.py", "import torch.distributed as d\nw = d.group.WORLD  # bad\n"),
    (torch_distributed, "x.py", "import torch.distributed as d\nw = d.GroupMember.WORLD  # bad\n"),
    (
        torch_distributed,
        "x.py",
        "import importlib as i\ni.import_module('torch.distributed')  # bad",
    ),
    (torch_distributed, "x.py", "import torch\ntorch.ops.c10d.allreduce_(1)  # bad\n"),
    (torch_distributed, "x.py", "def f(group: object) -> None:\n    group.allreduce()  # bad\n"),
    (
        torch_distributed,
        "x.py",
        "from torch.distributed.device_mesh import init_device_mesh  # bad\n",
    ),
    (torch_distributed, "x.py", "import torch.distributed.checkpoint as c\nc.save({})  # bad\n"),
    (
        torch_distributed,
        "x.py",
        "from torch._C._distributed_c10d import _register_process_group  # bad",
    ),
    (torch_distributed, COLLECTIVES, "import torch.distributed as dist\ndist.all_reduce(1)\n"),
    (torch_distributed, "x.py", "from torch.distributed import ProcessGroup, Work\n"),
    (torch_distributed, "x.py", "import torch.distributed as dist\nmax_ = dist.ReduceOp.MAX\n"),
    (torch_distributed, "x.py", "from torch.distributed.checkpoint import planner, metadata\n"),
    (
        torch_distributed,
        "x.py",
        "from torch.distributed.checkpoint import default_planner as p\n"
        "p.create_default_local_save_plan({}, True)\n",
    ),
    (torch_distributed, "x.py", "from megatron_lw.distributed.collectives import all_reduce\n"),
    (no_assert, "x.py", "assert True  # bad\ndef f() -> None:\n    assert 1, 'm'  # bad\n"),
    (no_assert, "x.py", "raise ValueError('assert')\n"),
    (no_pickle, "x.py", "import pickle  # bad\nimport torch\ntorch.load('a')  # bad\n"),
    (
        no_pickle,
        "x.py",
        "from torch import load as read  # bad\nimport torch.serialization  # bad\n",
    ),
    (no_pickle, "x.py", "import numpy as np\nnp.load('a', allow_pickle=True)  # bad\n"),
    (
        no_pickle,
        "x.py",
        "import importlib as i\ni.import_module('pickle')  # bad\neval('1')  # bad",
    ),
    (no_pickle, "x.py", "import torch\nmodel.load_state_dict({})\ntorch.compile(f)\nx.load()\n"),
    (no_probing, "x.py", "hasattr(1, 'a')  # bad\nsetattr(f, 'a', 1)  # bad\n"),
    (no_probing, "x.py", "read = getattr  # bad\ndelattr(f, 'a')  # bad\n"),
    (no_probing, "optimizer/describe_more.py", "getattr(1, 'a')  # bad\n"),
    (no_probing, "optimizer/describe.py", "getattr(1, 'a')\n"),
    (no_probing, "fp8/te.py", "getattr(1, 'a')\n"),
    (no_probing, "integrations/megatron/x.py", "getattr(1, 'a')\n"),
    (file_length, "x.py", "x = 1\n" * MAX_FILE_LINES + "x = 1  # bad\n"),
    (file_length, "x.py", "x = 1\n" * MAX_FILE_LINES),
    (
        function_length,
        "x.py",
        lines_of_function(MAX_FUNCTION_LINES + 1).replace(":\n", ":  # bad\n"),
    ),
    (function_length, "x.py", lines_of_function(MAX_FUNCTION_LINES)),
    (typed, "x.py", "def f(a: int):  # bad\n    pass\n"),
    (typed, "x.py", "def f(a: int, *, b) -> None:  # bad\n    pass\n"),
    (typed, "x.py", "def f(*a, **b) -> None:  # bad\n    pass\n"),
    (typed, "x.py", "class C:\n    def f(self, a) -> None:  # bad\n        pass\n"),
    (typed, "x.py", "class C:\n    def __init__(self):  # bad\n        pass\n"),
    (typed, "x.py", "class C:\n    @staticmethod\n    def f(a) -> int:  # bad\n        return a\n"),
    (
        typed,
        "x.py",
        "try:\n    pass\nfinally:\n    pass\nif f:\n    def f():  # bad\n        pass\n",
    ),
    (typed, "x.py", "class C:\n    def f(self, a: int, /, *b: int) -> None:\n        pass\n"),
    (typed, "x.py", "def _f(a):\n    return lambda b: b\n"),
    (transformer_engine, "x.py", "import transformer_engine.pytorch as te  # bad\n"),
    (
        transformer_engine,
        "fp8/x.py",
        "def f() -> None:\n    import transformer_engine_torch  # bad\n",
    ),
    (
        transformer_engine,
        "x.py",
        "import importlib as i\ni.util.find_spec('transformer_engine')  # bad",
    ),
    (transformer_engine, TRANSFORMER_ENGINE, "from transformer_engine.pytorch import Linear\n"),
    (transformer_engine, "x.py", "from megatron_lw.fp8 import te\n"),
    (megatron, "x.py", "from megatron.core import parallel_state  # bad\n"),
    (megatron, "cli/x.py", "from megatron import core  # bad\nimport megatron.core  # bad\n"),
    (megatron, "integrations/megatron/x.py", "from megatron.core import parallel_state\n"),
    (megatron, "x.py", "import megatron_lw\nfrom megatron_lw.errors import ConfigError\n"),
]


def test_the_package_is_walked() -> None:
    paths = [file.path for file in package()]
    assert "errors.py" in paths
    assert COLLECTIVES in paths


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: Rule) -> None:
    broken = [
        f"megatron_lw/{file.path}:{line}: {what}"
        for file in package()
        for line, what in sorted(set(rule(file)))
    ]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize(("rule", "path", "text"), SAMPLES)
def test_rule_finds_bad_lines_and_only_those(rule: Rule, path: str, text: str) -> None:
    bad = {n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# bad")}
    assert {line for line, _ in rule(source(path, text))} == bad


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_samples_of_both_kinds(rule: Rule) -> None:
    texts = [text for each, _, text in SAMPLES if each is rule]
    assert {"# bad" in text for text in texts} == {True, False}
