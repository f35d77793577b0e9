"""Reports of sections A and E about ranks: numbers that divide nothing, orders, rows of one length.

Class *exact sums* against one process, else *bitwise*. The plans alone are in
`test_plan_indivisible_a7` and `test_plan_order_a8`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw import fp8
from tests.distributed.cases import initial_values, integer_grads, reference_run, relative
from tests.harness import expect_failure_on_all, run_ranks
from tests.reference import Settings
from tests.regressions.given import CONFIG, MUON, Built, Tensors, backward, build, weights

Shapes = dict[str, tuple[int, ...]]


def trained(shapes: Shapes, config: dict[str, Any]) -> tuple[Tensors, int]:
    built = build(initial_values(shapes), config=config)
    for step in range(3):
        backward(built, integer_grads(shapes, built[0].groups.dp.rank, step))
        built[1].step()
    built[1].check(collectives=True)
    return weights(built), sum(1 for bucket in built[0].buckets for _ in bucket.row_slots())


CASES: dict[str, tuple[Shapes, dict[str, Any], int, int]] = {
    "two elements on four ranks": ({"a": (2,)}, CONFIG, 4, 3),
    "one element on three ranks": ({"a": ()}, CONFIG, 3, 2),
    "72 x 8 on five ranks": ({"w": (72, 8)}, MUON, 5, 0),
    "72 x 8 and 7 x 3 on four ranks": ({"w": (72, 8), "v": (7, 3)}, MUON, 4, 0),
    "1 x 1 on three ranks": ({"w": (1, 1)}, MUON, 3, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a1_a7_any_size_on_any_number_of_ranks_equals_one_process(case: str) -> None:
    """DeepSpeed#129, prime-rl#3437, #3438: an assertion, at construction or at the first step."""
    shapes, config, ranks, empty = CASES[case]
    settings = {
        name: Settings(lr=0.1, matrix=shape if config is MUON else None)  # type: ignore[arg-type]
        for name, shape in shapes.items()
    }
    masters, _ = reference_run(
        shapes, settings, ranks=ranks, kind="integer", values=initial_values(shapes)
    )
    results = run_ranks(trained, ranks, shapes, config)
    assert [held for _, held in results].count(0) == empty
    for found, _ in results:
        for name, weight in found.items():
            if config is MUON:
                assert relative(weight, masters[-1][name]) < 1e-5
            else:
                assert torch.equal(weight, masters[-1][name])
            assert not torch.equal(weight, initial_values(shapes)[name])


EQUAL: Shapes = {f"w{i}_weight": (8, 8) for i in range(12)}


def registered(shuffled: bool, differing: bool) -> tuple[Tensors, list[int], list[str]]:
    """Twelve equal matrices of two dtypes, in an order of this rank's own."""
    rank = megatron_lw.ParallelGroups.create().dp.rank
    order = list(EQUAL)
    if shuffled:
        order = order[4 * rank :] + order[: 4 * rank]
        order = order[::-1] if rank == 2 else order
    start = {name: tensor.bfloat16() for name, tensor in initial_values(EQUAL).items()}
    for name in ("w1_weight", "w10_weight"):
        start[name] = start[name].float()
    if differing and rank == 1:
        start["w11_weight"] = start["w11_weight"].view(4, 16)
    built = build({name: start[name] for name in order}, config={**MUON, "bf16": True})
    for step in range(2):
        backward(built, integer_grads(EQUAL, rank, step))
        built[1].step()
    (plan,) = built[1].runtime.plans.values()
    names = [name for bucket in built[0].buckets for name in bucket.names]
    return weights(built), plan.owner.tolist(), names


def test_a8_owners_do_not_depend_on_the_order_of_registration() -> None:
    """NVIDIA/Megatron-LM#5479, Paddle#79740: a stable sort over equal sizes, per rank."""
    plain = run_ranks(registered, 3, False, False)
    shuffled = run_ranks(registered, 3, True, False)
    for (ours, owners, names), (theirs, others, same) in zip(plain, shuffled, strict=True):
        assert owners == others == plain[0][1] and set(owners) == {0, 1, 2}
        assert names == same
        assert all(torch.equal(ours[name], theirs[name]) for name in EQUAL)


def test_a8_a_rank_with_another_shape_is_named_on_all() -> None:
    expect_failure_on_all(registered, 3, megatron_lw.PlanMismatchError, "w11_weight", True, True)


START = torch.arange(96.0).view(8, 12).div(8)


def plain_rows(dtypes: tuple[torch.dtype, ...]) -> Built:
    """Parameters of 96 elements in all, after a backward."""
    parts = zip(START.view(-1).split(96 // len(dtypes)), dtypes, strict=True)
    named = {f"p{i}": part.to(dtype) for i, (part, dtype) in enumerate(parts)}
    built = build(named, config={**CONFIG, "bf16": torch.bfloat16 in dtypes})
    backward(built, {name: torch.ones(part.shape) for name, part in named.items()})
    return built


def quantised_rows() -> Built:
    """One FP8 weight of 96 elements that travels as FP8, after a backward."""
    layer = torch.nn.Linear(12, 8, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(START)
    model = fp8.quantize_model(torch.nn.Sequential(layer), "tensor")
    ddp = megatron_lw.DistributedDataParallel(
        model,
        megatron_lw.ParallelGroups.create(),
        megatron_lw.DDPConfig(fp8_param_gather=True),
    )
    settings = megatron_lw.OptimizerConfig(**CONFIG, bf16=True)
    optimizer = megatron_lw.get_megatron_optimizer(settings, [ddp])
    optimizer.zero_grad()
    ddp(torch.ones(2, 12, dtype=torch.bfloat16)).sum().backward()
    return ddp, optimizer


def rows_of_one_length(dtypes: tuple[torch.dtype, ...]) -> tuple[int, Tensors, int]:
    """Elements in this rank's row, weights after a step, and bytes sent by its gather."""
    ddp, optimizer = plain_rows(dtypes) if dtypes else quantised_rows()
    traffic = ddp.groups.dp.traffic
    before = traffic.nbytes["all_gather"]
    optimizer.step()
    (bucket,) = ddp.buckets
    seen = {
        name: param.dequantize() if isinstance(param, fp8.QuantisedTensor) else param
        for name, param in bucket.params.items()
    }
    return (
        sum(slot.numel for _, slot in bucket.row_slots()),
        {name: tensor.detach().float().clone() for name, tensor in seen.items()},
        traffic.nbytes["all_gather"] - before,
    )


@pytest.mark.parametrize(
    ("dtypes", "row_nbytes"),
    [
        ((torch.float32,), 64 * 4),
        ((torch.bfloat16,), 64 * 2),
        ((torch.float32, torch.bfloat16), 48 * 4),
        ((), 64),
    ],
    ids=["fp32", "bf16", "packed bytes", "fp8 as bytes"],
)
def test_e14_rows_that_hold_more_less_and_nothing_travel_at_one_length(
    dtypes: tuple[torch.dtype, ...], row_nbytes: int
) -> None:
    """pytorch#156627, #85234: gloo refuses rows of different lengths, empty ones, and float8."""
    results = run_ranks(rows_of_one_length, 3, dtypes)
    held = [count for count, _, _ in results]
    assert 0 in held and sum(held) == 96
    assert [sent for *_, sent in results] == [2 * row_nbytes] * 3
    for _, found, _ in results:
        got = torch.cat([found[name].reshape(-1) for name in sorted(found)])
        # Adam's first step is the rate; FP8 rounds by a sixteenth.
        close = {"rtol": 2**-8, "atol": 1e-6} if dtypes else {"rtol": 1 / 15, "atol": 0.05}
        torch.testing.assert_close(got, START.view(-1) - 0.1, **close)
        assert all(torch.equal(found[n], results[0][1][n]) for n in found)
