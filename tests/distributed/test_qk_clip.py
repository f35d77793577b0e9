"""QK-clip: heads whose logits are too large, over tensor and data parallelism."""

from __future__ import annotations

import math

import pytest
import torch

import megatron_lw
from megatron_lw import HeadRows, QKClip
from megatron_lw.errors import ConfigError, PlanMismatchError, StateError
from tests.distributed.cases import Bag
from tests.harness import run_ranks

HEADS, KEY_HEADS, WIDTH, HIDDEN = 4, 2, 6, 10
SERVED = HEADS // KEY_HEADS
SHAPES = {"q_weight": (HEADS * WIDTH, HIDDEN), "k_weight": (KEY_HEADS * WIDTH, HIDDEN),
          "o_weight": (HIDDEN, HEADS * WIDTH)}  # fmt: skip
CONFIG = {"optimizer": "muon", "lr": 0.0, "clip_grad": 0.0, "weight_decay": 0.0}
THRESHOLD = 5.0


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def logits(q_weight, k_weight, x):
    """[tokens, tokens] for each query head."""
    q = (x @ q_weight.T).view(len(x), HEADS, WIDTH)
    k = (x @ k_weight.T).view(len(x), KEY_HEADS, WIDTH).repeat_interleave(SERVED, dim=1)
    return torch.einsum("ihd,jhd->hij", q, k)


def tokens(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    return torch.randn(7, HIDDEN, generator=generator) * (0.3 + 0.5 * rank)


def layer() -> list[HeadRows]:
    return [
        *HeadRows.of_heads("q_weight", WIDTH, HEADS),
        *HeadRows.of_heads("k_weight", WIDTH, KEY_HEADS, served=SERVED),
    ]


def build(groups, optimizer="muon"):
    """A model whose queries, keys and outputs are divided over tensor parallelism."""
    tp = groups.tp
    model = Bag({}, torch.float32)
    for name, value in values().items():
        dim = 1 if name == "o_weight" else 0
        part = torch.nn.Parameter(value.chunk(tp.size, dim=dim)[tp.rank].clone())
        megatron_lw.annotate(part, tp_dim=dim)
        model.register_parameter(name, part)
    ddp = megatron_lw.DistributedDataParallel(model, groups, megatron_lw.DDPConfig(bucket_size=64))
    config = megatron_lw.OptimizerConfig(**{**CONFIG, "optimizer": optimizer})
    return ddp, megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)


def step(ddp, optimizer):
    optimizer.zero_grad()
    ddp({n: torch.ones(p.shape) for n, p in ddp.module.named_parameters()}).backward()
    optimizer.step()


def clipped(tensor, optimizer_name):
    groups = megatron_lw.ParallelGroups.create(tensor=tensor)
    ddp, optimizer = build(groups, optimizer_name)
    clip = QKClip(optimizer, {"attention": layer()}, HEADS, THRESHOLD)
    whole = values()
    here = HEADS // tensor
    first = groups.tp.rank * here
    for micro in range(2):
        seen = logits(whole["q_weight"], whole["k_weight"], tokens(groups.dp.rank, micro))
        clip.observe("attention", seen.amax(dim=(1, 2))[first : first + here], first)
    step(ddp, optimizer)
    after = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    step(ddp, optimizer)  # nothing was observed since
    again = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    optimizer.check(collectives=True)
    return groups.tp.rank, after, again


def expected(data_ranks: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """By the formula, on one process."""
    whole = values()
    maxima = torch.full((HEADS,), -math.inf)
    for rank in range(data_ranks):
        for micro in range(2):
            seen = logits(whole["q_weight"], whole["k_weight"], tokens(rank, micro))
            maxima = torch.maximum(maxima, seen.amax(dim=(1, 2)))
    factor = (THRESHOLD / maxima).clamp(max=1.0)
    assert 0 < int((factor < 1).sum()) < HEADS or data_ranks > 1
    q, k = whole["q_weight"].clone(), whole["k_weight"].clone()
    for head in range(HEADS):
        q[head * WIDTH : (head + 1) * WIDTH] *= factor[head] ** 0.5
    for head in range(KEY_HEADS):
        smallest = factor[head * SERVED : (head + 1) * SERVED].min()
        k[head * WIDTH : (head + 1) * WIDTH] *= smallest**0.5
    return {"q_weight": q, "k_weight": k, "o_weight": whole["o_weight"]}, factor


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (3, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_heads_are_scaled_by_the_largest_logit_of_all_ranks(ranks, tensor, optimizer):
    """Class numerical: grouped keys, rows cut anywhere; at a learning rate of 0."""
    want, factor = expected(ranks // tensor)
    for tp_rank, after, again in run_ranks(clipped, ranks, tensor, optimizer):
        for name, weight in after.items():
            dim = 1 if name == "o_weight" else 0
            part = want[name].chunk(tensor, dim=dim)[tp_rank]
            torch.testing.assert_close(weight, part, rtol=1e-6, atol=1e-7)
            assert torch.equal(again[name], weight)
    assert float(factor.min()) < 1.0


def test_no_logit_is_above_the_threshold_afterwards():
    """Class numerical, on the tokens that were seen."""
    want, factor = expected(1)
    for micro in range(2):
        before = logits(values()["q_weight"], values()["k_weight"], tokens(0, micro))
        after = logits(want["q_weight"], want["k_weight"], tokens(0, micro))
        assert float(after.max()) <= THRESHOLD * (1 + 1e-5)
        # Heads share a key head, so one that was small enough may become smaller with it.
        assert bool((after.amax((1, 2)) <= before.amax((1, 2)) * factor.sqrt() + 1e-5).all())


def single(**changes):
    groups = megatron_lw.ParallelGroups.single()
    ddp, optimizer = build(groups)
    rows = changes.pop("rows", layer())
    return ddp, optimizer, QKClip(optimizer, {"attention": rows}, HEADS, **changes)


def test_the_power_of_the_factor_and_rows_of_several_runs():
    """Exact: latent attention scales the rotary part of a query by the factor itself."""
    rows = [HeadRows(param="q_weight", start=0, stop=4, heads=(0,)),
            HeadRows(param="q_weight", start=4, stop=6, heads=(0,), power=1.0)]  # fmt: skip
    ddp, optimizer, clip = single(rows=rows, threshold=4.0)
    clip.observe("attention", torch.tensor([16.0, 1e9, -3.0, 0.0]))
    step(ddp, optimizer)
    weight, before = ddp.module.q_weight.detach(), values()["q_weight"]
    assert torch.equal(weight[:4], before[:4] * 0.5)
    assert torch.equal(weight[4:6], before[4:6] * 0.25)
    assert torch.equal(weight[6:], before[6:])


def test_logits_that_are_not_finite_break_the_step_by_name():
    """Nothing is published, and the layer is named."""
    ddp, optimizer, clip = single()
    clip.observe("attention", torch.tensor([1.0, math.nan]), first_head=2)
    with pytest.raises(StateError, match="qk-clip: logits of 'attention' are not finite"):
        step(ddp, optimizer)
    assert torch.equal(ddp.module.q_weight.detach(), values()["q_weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 0.0}, "threshold = 0.0"),
        ({"rows": [HeadRows(param="x", start=0, stop=1, heads=(0,))]}, "names 'x', which is no"),
        ({"rows": [HeadRows(param="q_weight", start=0, stop=99, heads=(0,))]}, "24 rows"),
        ({"rows": [HeadRows(param="q_weight", start=0, stop=6, heads=(4,))]}, "4 heads"),
        ({"rows": [HeadRows(param="q_weight", start=0, stop=6, heads=())]}, "does not fit"),
    ],
)
def test_what_cannot_be_scaled_is_refused(changes, message):
    """At construction, by name."""
    with pytest.raises(ConfigError, match=message):
        single(**changes)


def test_heads_and_layers_that_there_are_not():
    """When they are observed."""
    _, _, clip = single()
    for layer_name, heads, first in (("mlp", 4, 0), ("attention", 3, 2), ("attention", 1, -1)):
        with pytest.raises(ConfigError, match="the layers are attention, each with 4 heads"):
            clip.observe(layer_name, torch.ones(heads), first)


def disagreeing():
    groups = megatron_lw.ParallelGroups.create()
    _, optimizer = build(groups)
    try:
        QKClip(optimizer, {"attention": layer()}, HEADS, threshold=1.0 + groups.world.rank)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_ranks_must_declare_the_same():
    """On every rank."""
    for message in run_ranks(disagreeing, 2):
        assert "rows of QK-clip differ" in message and "threshold" in message
