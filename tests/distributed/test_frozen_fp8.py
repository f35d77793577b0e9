"""Frozen weights that are kept as FP8, saved and loaded. Class *bitwise*."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_lw.dist_checkpointing.export import export
from megatron_lw.dist_checkpointing.frozen import PLANES
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.reshard import reshard
from megatron_lw.dist_checkpointing.verify import verify
from megatron_lw.fp8.tensor import QuantisedTensor
from megatron_lw.topology import Topology
from tests.distributed import history_cases as cases
from tests.distributed.fp8_cases import RECIPES, same
from tests.harness import run_ranks

EVERY = pytest.mark.parametrize("recipe", RECIPES)


def quantised(values: cases.State, recipe: str) -> cases.State:
    """Bytes and scales of values that are quantised anew."""
    return {
        f"{key} of {name}": tensor
        for name, value in values.items()
        for key, tensor in QuantisedTensor.from_values(value, RECIPES[recipe])
        .planes.tensors()
        .items()
    }


@EVERY
def test_bytes_and_scales_are_those_before_the_save(recipe: str, tmp_path: Path) -> None:
    [(before, values), *_] = run_ranks(cases.save_frozen, 2, tmp_path, recipe)
    assert all(tensor.any() for key, tensor in before.items() if "data" in key)
    for after, found, left_out in run_ranks(cases.load_frozen, 2, tmp_path, recipe):
        same(before, after)
        same(values, found)
        assert left_out == []


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_another_number_of_ranks_and_a_reshard_change_nothing(recipe: str, tmp_path: Path) -> None:
    [(before, _), *_] = run_ranks(cases.save_frozen, 2, tmp_path / "saved", recipe)
    assert verify(tmp_path / "saved").problems == ()
    layout = Topology(dp=3, tp=1, etp=1, ep=1, pp=1)
    made = reshard(tmp_path / "saved", tmp_path / "made", layout, bucket_size=20000)
    assert verify(made).problems == ()
    for folder in (tmp_path / "saved", made):
        for after, _, _ in run_ranks(cases.load_frozen, 3, folder, recipe):
            same(before, after)


def test_another_recipe_quantises_the_values(tmp_path: Path) -> None:
    [(_, values), *_] = run_ranks(cases.save_frozen, 2, tmp_path, "block-fp32")
    for recipe in ("mxfp8", "block", "delayed"):
        [(after, _, _), *_] = run_ranks(cases.load_frozen, 2, tmp_path, recipe)
        same(quantised(values, recipe), after)


def test_frozen_then_and_not_now_and_the_reverse(tmp_path: Path) -> None:
    """A master starts from the values; a weight that had a master is quantised from it."""
    [(_, values), *_] = run_ranks(cases.save_frozen, 2, tmp_path / "frozen", "mxfp8")
    leave_out = ("*/momentum", "*/exp_avg", "*/exp_avg_sq")
    [(after, _, _), *_] = run_ranks(
        cases.load_frozen, 2, tmp_path / "frozen", "mxfp8", False, leave_out
    )
    same(quantised(values, "mxfp8"), after)
    [(before, _), *_] = run_ranks(cases.save_frozen, 2, tmp_path / "trained", "block", False)
    [(after, _, _), *_] = run_ranks(
        cases.load_frozen, 2, tmp_path / "trained", "block", True, leave_out
    )
    same(before, after)


def test_what_is_left_out_stays(tmp_path: Path) -> None:
    [(before, _), *_] = run_ranks(cases.save_frozen, 2, tmp_path, "mxfp8")
    [(after, found, left_out), *_] = run_ranks(
        cases.load_frozen, 2, tmp_path, "mxfp8", True, ("mid.weight",)
    )
    assert "mid.weight/value" in left_out
    assert (found["mid.weight"] == 7.0).all()
    kept = [key for key in before if "experts" in key]
    assert kept and all(torch.equal(before[key], after[key]) for key in kept)


def test_parts_of_tensor_parallelism_keep_their_bytes(tmp_path: Path) -> None:
    """The same parts: their bytes. One part: the values of both, quantised."""
    both = run_ranks(cases.frozen_parts, 2, tmp_path, 2, True)
    assert not torch.equal(both[0]["row_scale of it"], both[1]["row_scale of it"])
    for before, after in zip(
        both, run_ranks(cases.frozen_parts, 2, tmp_path, 2, False), strict=True
    ):
        same(before, after)
    [one] = run_ranks(cases.frozen_parts, 1, tmp_path, 1, False)
    wanted = quantised({"it": torch.cat([each["values"] for each in both])}, "delayed")
    same(wanted, {key: tensor for key, tensor in one.items() if key != "values"})


def test_tools_see_values_and_not_bytes(tmp_path: Path) -> None:
    run_ranks(cases.save_frozen, 2, tmp_path / "saved", "mxfp8")
    manifest = CheckpointReader(tmp_path / "saved").manifest
    names = {record.name for record in manifest.tensors}
    assert f"{PLANES}mxfp8,derive_columns=False/1 of 1/row_data/mid.weight" in names
    exported = export(tmp_path / "saved", tmp_path / "exported")
    assert exported.num_weights == len(manifest.params) + 2
