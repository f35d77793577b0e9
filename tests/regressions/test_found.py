"""What the property tests have found in this library, each as the input it comes down to.

Overlapped reduces of a group were started in another order on two ranks where a parameter got no
gradient on one of them, and gradients divided by tokens were not averaged over copies. A save in
the midst of such a step waited for ever. Class *exact sums*, element-wise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megatron_lw
from megatron_lw.dist_checkpointing import load, save
from tests.distributed.cases import Bag, initial_values
from tests.harness import run_ranks
from tests.regressions.given import CONFIG, Tensors, backward, build, reduced, weights

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1}
SHAPE = (16, 16)


def replica_and_tokens() -> dict[str, list[float]]:
    built = build(
        {"a_bias": torch.ones(3), "b_bias": torch.ones(3)},
        tags={"b_bias": {"keep_fp32": True}},
        tensor=2,
    )
    backward(built, {"a_bias": torch.full((3,), 12.0), "b_bias": torch.full((3,), 12.0)})
    megatron_lw.finalize_model_grads([built[0]], torch.tensor(4))
    return reduced(built)


def test_tokens_divide_the_average_over_fp32_copies_and_not_their_sum() -> None:
    """Two tensor-parallel ranks, the same gradient of 12 over 4 tokens on both: 3, not 6."""
    first, second = run_ranks(replica_and_tokens, 2)
    assert set(first["a_bias"]) == set(second["a_bias"]) == {3.0}
    assert {value for found in (first, second) for value in found.get("b_bias", [])} == {3.0}


def two_chunks(overlap: bool) -> Tensors:
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.DDPConfig(overlap_grad_reduce=overlap)
    chunks = [
        megatron_lw.DistributedDataParallel(Bag({name: SHAPE}, torch.float32), groups, config)
        for name in ("a_weight", "b_weight")
    ]
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), chunks)
    grad = torch.ones(SHAPE)
    for step in range(3):
        optimizer.zero_grad()
        grads = {"a_weight": grad, "b_weight": 2 * grad}
        if step == 1 and groups.dp.rank == 0:
            del grads["b_weight"]
        loss = sum((chunk(grads) for chunk in chunks), torch.zeros(()))
        loss.backward()
        optimizer.step()
    return {n: t.clone() for chunk in chunks for n, t in chunk.state_dict().items()}


def test_chunks_reduce_in_one_order_also_where_a_gradient_does_not_come() -> None:
    """The last chunk is incomplete on rank 0 alone, which must not start the first one's reduce."""
    plain = run_ranks(two_chunks, 2, False)
    for a, b in zip(plain, run_ranks(two_chunks, 2, True), strict=True):
        for name, weight in a.items():
            assert torch.equal(weight, b[name]), name
            assert not torch.equal(weight, initial_values({name: SHAPE})[name]), name


def uneven_experts(overlap: bool) -> tuple[Tensors, int]:
    """Rank 1 has experts, rank 0 has none: bucket numbers of the two mean different buckets."""
    rank = megatron_lw.ParallelGroups.create(expert=2).ep.rank
    shapes = {"a_weight": SHAPE, "b_weight": SHAPE}
    if rank == 1:
        shapes |= {"e1_weight": SHAPE, "e2_weight": SHAPE}
    built = build(
        {name: torch.ones(shape) for name, shape in shapes.items()},
        tags={name: {"expert": True} for name in shapes if name[0] == "e"},
        ddp_config=OVERLAP if overlap else {"bucket_size": 1},
        expert=2,
    )
    for step in range(3):
        skipped = {"a_weight", "e1_weight"} if step == 0 else set()
        backward(built, {n: torch.ones(SHAPE) for n in shapes if n not in skipped})
        built[1].step()
    return weights(built), len(built[0].buckets)


def test_ranks_with_other_experts_agree_on_the_order_of_reduces() -> None:
    plain, overlapped = (run_ranks(uneven_experts, 2, overlap) for overlap in (False, True))
    assert [buckets for _, buckets in overlapped] == [2, 4]
    for (a, _), (b, _) in zip(plain, overlapped, strict=True):
        for name, weight in a.items():
            assert torch.equal(weight, b[name]), name


def tokens_after_some_reduces(overlap: bool) -> Tensors:
    built = build(
        {"a_weight": torch.ones(SHAPE)},
        ddp_config={"overlap_grad_reduce": overlap},
    )
    rank = built[0].groups.dp.rank
    for step in range(3):
        backward(built, {"a_weight": torch.ones(SHAPE)} if step != 1 or rank else {})
        megatron_lw.finalize_model_grads([built[0]], torch.tensor(1 + rank))
        built[1].step()
    return weights(built)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_are_counted_after_all_reduces_are_started(ranks: int) -> None:
    """Backward has started the reduce on all ranks but one; the count goes over the same group."""
    plain = run_ranks(tokens_after_some_reduces, ranks, False)
    overlapped = run_ranks(tokens_after_some_reduces, ranks, True)
    for a, b in zip(plain, overlapped, strict=True):
        assert torch.equal(a["a_weight"], b["a_weight"])
        assert not torch.equal(a["a_weight"], torch.ones(SHAPE))


def interrupted(root: Path, what: str, missing: bool) -> tuple[Tensors, bool, str]:
    """Between an overlapped backward and its step; some gradients do not come on rank 0."""
    built = build(
        {"a_weight": torch.ones(SHAPE), "b_weight": torch.ones(SHAPE), "c_bias": torch.ones(7)},
        ddp_config=OVERLAP,
    )
    ddp, optimizer = built
    names, message, ahead = list(ddp.module.state_dict()), "", False
    for step in range(3):
        gone = {0: set(names), 1: {"b_weight"}}.get(ddp.groups.dp.rank, set())
        gone = gone if missing and step == 1 else set()
        backward(
            built,
            {n: torch.ones(ddp.module.get_parameter(n).shape) for n in names if n not in gone},
        )
        if step == 1:
            ahead = any(bucket.handle.outstanding for bucket in ddp.buckets)
            if what == "save":
                save(root, *built, step=step, background=True)
            elif what == "load":
                load(root, *built)
                continue
            elif what:
                try:
                    if what == "check":
                        optimizer.check()
                    else:
                        optimizer.add_param_group({"params": [ddp.module.c_bias], "lr": 1.0})
                except megatron_lw.StateError as error:
                    message = str(error)
        optimizer.step()
        if what == "load" and step == 0:
            save(root, *built, step=step)
    optimizer.check(collectives=True)
    return weights(built), ahead, message


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("missing", [False, True], ids=["all come", "some are missing"])
def test_a_call_between_backward_and_step_finds_all_ranks_at_the_same_reduces(
    tmp_path: Path, ranks: int, missing: bool
) -> None:
    """Ranks whose gradients have all come had begun reduces that the others had not."""
    plain = run_ranks(interrupted, ranks, tmp_path, "", missing)
    assert any(ahead for _, ahead, _ in plain)
    assert not missing or not all(ahead for _, ahead, _ in plain)
    refused = {
        "check": "between backward and step() with overlap",
        "add": "add_param_group after the first step",
    }
    for what in ("save", *refused):
        for (weight, *_), (other, _, message) in zip(
            plain, run_ranks(interrupted, ranks, tmp_path / what, what, missing), strict=True
        ):
            assert all(torch.equal(weight[name], other[name]) for name in weight)
            assert refused.get(what, "") in message and bool(message) == (what in refused)
    loaded = run_ranks(interrupted, ranks, tmp_path / "load", "load", missing)
    for weight, *_ in loaded:
        assert all(torch.equal(weight[name], loaded[0][0][name]) for name in weight)
        assert not torch.equal(weight["a_weight"], torch.ones(SHAPE))
