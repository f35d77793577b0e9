"""The example trains alike in every layout. Class *numerical*: fp32, one process is the reference.

Each case of training is a whole run of `examples/pretrain_gpt.py`: data, training, held-out loss,
files. The losses of every step, the gradient norms and the held-out losses are held against those
of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import megatron_lw
from megatron_lw.optimizer.boxes import Box, BoxPair
from megatron_lw.optimizer.describe import describe
from tests.harness import run_ranks
from tests.unit.example_modules import example

MODEL = "--layers 2 --width 32 --heads 2 --sequence 16 --dtype fp32"
RUN = "--steps 6 --global-batch 8 --micro-batches 2 --eval-every 3 --eval-windows 8"
TEXT = b"to be or not to be that is the question " * 200
COUNTED = ("tp", "ep", "pp", "embedding")
TOLERANCE = 1e-5
"""Of losses, in nats a byte, over 6 steps; of gradient norms ten times as much, relatively."""


def run_example(flags: str, folder: Path) -> dict[str, dict[str, int]]:
    """Run the script on this rank; return the calls that it made over each group."""
    script, prepare = example("pretrain_gpt"), example("prepare")
    made = []

    def recorded(args: argparse.Namespace) -> megatron_lw.ParallelGroups:
        made.append(make_groups(args))
        return made[0]

    make_groups = prepare.make_groups
    files = f"--data {folder / 'text.txt'} --out {folder}"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(prepare, "make_groups", recorded)
        patch.setitem(sys.modules, "matplotlib.figure", None)  # the curve has a test of its own
        status = script.main(f"{MODEL} {RUN} {files} {flags}".split())
    if status:
        raise RuntimeError(f"the script ended with status {status}")
    [groups] = made
    return {name: dict(getattr(groups, name).traffic.calls) for name in COUNTED}


def losses(ranks: int, flags: str, folder: Path) -> tuple[list[list[float]], list[object]]:
    """Loss, norm and held-out loss of every step, and what each rank counted."""
    folder.mkdir()
    (folder / "text.txt").write_bytes(TEXT)
    counted = run_ranks(run_example, ranks, flags, folder)
    with (folder / "loss.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [[float(row[name]) for row in rows] for name in ("loss", "grad_norm")]
    columns.append([float(row["held_out"]) for row in rows if row["held_out"]])
    return columns, counted


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """What one rank computes with the flags that change the model, each once."""

    @cache
    def run(flags: str) -> list[list[float]]:
        return losses(1, flags, tmp_path_factory.mktemp("one") / "run")[0]

    return run


CASES = {
    "T2": (2, "", "--tp 2", {"tp": "all_reduce"}),
    "T2 SP": (2, "", "--tp 2 --sp", {"tp": "reduce_scatter"}),
    "E2": (2, "--experts 4", "--ep 2", {"ep": "all_to_all"}),
    "T2 E2": (2, "--experts 4", "--tp 2 --ep 2", {"tp": "all_gather", "ep": "all_to_all"}),
    "P2": (2, "", "--pp 2 --micro-batches 4", {"pp": "send"}),
    "P2 tied": (2, "--tied", "--pp 2 --micro-batches 1", {"pp": "send", "embedding": "all_reduce"}),
    "D2 T2 overlap": (4, "", "--tp 2 --overlap", {"tp": "all_reduce"}),
    "T2 SP P2 tied overlap": (
        4,
        "--tied",
        "--tp 2 --sp --pp 2 --overlap",
        {"tp": "reduce_scatter", "pp": "send", "embedding": "all_reduce"},
    ),
    "D2 T2 SP E2": (
        4,
        "--experts 4",
        "--tp 2 --sp --ep 2",
        {"tp": "reduce_scatter", "ep": "all_to_all"},
    ),
}


@pytest.mark.parametrize(("ranks", "model", "flags", "used"), CASES.values(), ids=CASES)
def test_losses_are_those_of_one_rank(ranks, model, flags, used, one_rank, tmp_path):
    expected = one_rank(model)
    actual, counted = losses(ranks, f"{model} {flags}", tmp_path / "run")
    loss, norm, held_out = actual
    assert loss == pytest.approx(expected[0], rel=0, abs=TOLERANCE)
    assert norm == pytest.approx(expected[1], rel=10 * TOLERANCE, abs=0)
    assert held_out == pytest.approx(expected[2], rel=0, abs=TOLERANCE)
    assert len(loss) == 6 and len(held_out) == 2
    assert loss[0] - loss[-1] > 1, "it learns, so that a wrong gradient would show"
    for group, call in used.items():
        assert any(calls[group].get(call) for calls in counted), f"no {call} over {group}"


def parts(flags: str) -> list[tuple[str, torch.Tensor, tuple[BoxPair, ...]]]:
    """What this rank has of the model, and which boxes of the whole it says that is."""
    args = example("settings").make_parser().parse_args(f"{MODEL} {flags}".split())
    example("settings").check_arguments(args)
    prepare, gpt = example("prepare"), example("gpt")
    config = gpt.GPTConfig(layers=2, width=32, heads=2, tied=args.tied, dtype=torch.float32)
    groups = prepare.make_groups(args)
    stage = prepare.build(config, args, groups)
    model = describe([stage], groups, stage.names)
    return [(info.name, model.params[info.name], info.boxes) for info in model.infos]


@pytest.mark.parametrize("tied", ["", "--tied"], ids=["untied", "tied"])
def test_parts_are_what_their_annotations_say(tied):
    """Bitwise: all ranks' parts, put together by their boxes, are the whole model, of one name."""
    flags = f"{tied} --experts 4"
    [whole] = run_ranks(parts, 1, flags)
    ranks = run_ranks(parts, 4, f"{flags} --tp 2 --ep 2 --pp 2 --sp")
    expected = {name: weight for name, weight, _ in whole}
    covered = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for name, weight, pairs in (part for rank in ranks for part in rank):
        for pair in pairs:
            at, here = box_slices(pair.world), box_slices(pair.local)
            assert torch.equal(expected[name][at], weight[here]), name
            covered[name][at] = 1
    assert all(places.all() for places in covered.values())
    fused = [pairs for name, _, pairs in ranks[0] if name.endswith("qkv.weight")]
    assert [len(pairs) for pairs in fused] == [3], "query, key and value"


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


@pytest.mark.parametrize("ranks, flags", [(1, ""), (4, "--tp 2 --pp 2"), (2, "--overlap")])
def test_a_run_that_stopped_goes_on_in_another_layout(one_rank, tmp_path, ranks, flags):
    """Two ranks save half-way, any layout goes on: the later steps are those of one rank's run."""
    reference = one_rank("")
    saves = f"--save {tmp_path / 'saved'} --save-interval 3"
    (loss, norm, _), _ = losses(2, saves, tmp_path / "first")
    assert loss == pytest.approx(reference[0], abs=TOLERANCE)
    saved = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert saved == ["step-0000000003", "step-0000000006"]
    half = tmp_path / "saved" / "step-0000000003"
    (loss, norm, held_out), _ = losses(ranks, f"{flags} --load {half}", tmp_path / "second")
    assert loss == pytest.approx(reference[0][3:], abs=TOLERANCE)
    assert norm == pytest.approx(reference[1][3:], rel=10 * TOLERANCE)
    assert held_out == pytest.approx(reference[2][1:], abs=TOLERANCE)


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "adamuon", "adam", "lion", "sgd"])
def test_every_optimizer_lowers_the_loss(optimizer: str, tmp_path: Path) -> None:
    """On text that repeats, each with its own default rate: a third of a nat in 6 steps."""
    (loss, _, held_out), _ = losses(1, f"--optimizer {optimizer}", tmp_path / "run")
    assert loss[-1] < loss[0] - 0.3
    assert held_out[-1] < held_out[0]
