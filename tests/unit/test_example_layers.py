"""The parallel layers of the examples on one rank, held against plain ones; wrong flags."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import megatron_lw
from tests.unit.example_modules import example

gpt = example("gpt")
layers = example("parallel_layers")
moe = example("moe")
prepare = example("prepare")
settings = example("settings")

GROUPS = megatron_lw.ParallelGroups.single()
STREAM = layers.Stream(group=GROUPS.tp)
CONFIG = gpt.GPTConfig(layers=2, width=32, heads=2, sequence=16, dtype=torch.float32)


def randomise(module: torch.nn.Module) -> None:
    """No weight is zero, as some are at first, so that every gradient is something."""
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        weight.data.normal_(std=0.2, generator=generator)


@pytest.mark.parametrize("tied", [False, True])
def test_one_stage_of_undivided_layers_is_the_plain_model(tied: bool) -> None:
    """Bitwise: loss and gradients; and the names are the same."""
    config = gpt.GPTConfig(layers=2, width=32, heads=2, sequence=16, tied=tied, dtype=torch.float32)
    args = SimpleNamespace(seed=0, sp=False, experts=0)
    torch.manual_seed(0)
    plain, stage = gpt.GPT(config), prepare.build(config, args, GROUPS)
    tokens, targets = torch.randint(256, (2, 3, 16))
    for model in (plain, stage):
        randomise(model)
        model(tokens, targets).backward()
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    actual = {name: weight.grad for name, weight in stage.named_parameters()}
    assert plain(tokens, targets).item() == stage(tokens, targets).item()
    assert list(expected) == list(actual)
    for name, gradient in expected.items():
        assert gradient.any() and torch.equal(gradient, actual[name]), name


def test_a_token_gets_what_its_expert_says_times_the_probability() -> None:
    """Numerical, 1e-6: every expert over every token, of which one is kept; no token for one."""
    mixture = moe.MoE(CONFIG, 4, GROUPS.ep, STREAM)
    randomise(mixture)
    mixture.router.weight.data[2] = 0  # probability above a quarter for some other, always
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2))
    weights = [x.requires_grad_(), *mixture.parameters()]

    actual = mixture(x)
    probabilities = functional.softmax(mixture.router(x), dim=-1)
    best = functional.one_hot(probabilities.argmax(dim=-1), 4)
    kept = (probabilities * best).unbind(dim=-1)
    every = [expert(x) for expert in mixture.experts.values()]
    expected = sum(p[..., None] * y for p, y in zip(kept, every, strict=True))

    counts = best.sum((0, 1))
    assert counts.count_nonzero() >= 2
    assert torch.dist(actual, expected) < 1e-6 * expected.norm()
    grads = [torch.autograd.grad(y.square().sum(), weights) for y in (actual, expected)]
    for one, other in zip(*grads, strict=True):
        assert torch.dist(one, other) <= 1e-6 * other.norm()


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    """Bitwise. Whether an expert takes part in backward must not depend on where tokens go."""
    mixture = moe.MoE(CONFIG, 4, GROUPS.ep, STREAM)
    randomise(mixture)
    mixture.router.weight.data.zero_()  # all equal: the first is taken
    mixture(torch.randn(1, 16, 32)).square().sum().backward()
    used = {n: bool(e.down.weight.grad.any()) for n, e in mixture.experts.items()}
    assert used == {"0": True, "1": False, "2": False, "3": False}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--sp", "--sp: needs --tp 2"),
        ("--ep 2 --experts 0", "--experts 0: must be at least 1"),
        ("--experts -1", "--experts -1: must be at least 0"),
        ("--tp 2 --sp --sequence 15", "--sequence 15 must be a multiple of --tp 2"),
        ("--tp 2 --experts 4 --sequence 15", "--sequence 15 must be a multiple of --tp 2"),
    ],
)
def test_layouts_that_cannot_be_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        settings.check_arguments(settings.make_parser().parse_args(line.split()))


def test_experts_are_there_where_ranks_are_to_share_them() -> None:
    found = []
    for line in ("", "--ep 2", "--ep 2 --experts 8", "--experts 3"):
        args = settings.make_parser().parse_args(line.split())
        settings.check_arguments(args)
        found.append(args.experts)
    assert found == [0, 4, 8, 3]


@pytest.mark.parametrize("line", ["--tp 2", "--ep 2", "--pp 2", "--tp 2 --ep 2 --pp 2"])
def test_one_process_is_not_enough_for_two_ranks(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        prepare.start(settings.make_parser().parse_args(line.split()))
    assert stop.value.code == 2
    needed = 4 if "--tp 2 --ep" in line else 2
    assert f"need a multiple of {needed} ranks, not 1" in capsys.readouterr().err


def test_sizes_that_do_not_divide_are_named() -> None:
    pair = SimpleNamespace(size=2, rank=0)
    model = gpt.GPT(gpt.GPTConfig(layers=3, width=30, heads=3, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"^--heads 3 must be a multiple of --tp 2"):
        layers.divide(model, layers.Stream(group=pair))
    with pytest.raises(ValueError, match=r"^--layers 3 must be a multiple of --pp 2"):
        example("pipeline").Stage(model, pair, STREAM)
    with pytest.raises(ValueError, match=r"^--experts 3 must be a multiple of --ep 2"):
        moe.MoE(CONFIG, 3, pair, STREAM)
