"""`megatron-lw plan`: JSON, tables, plots, topology and refusals. Exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lw.cli.main import main
from megatron_lw.cli.model_file import read_model
from megatron_lw.cli.topology import split_model
from megatron_lw.errors import ConfigError
from megatron_lw.presets import model_params, preset
from megatron_lw.topology import Topology

KEYS = {
    "padding_fraction",
    "ns_makespan_over_bound",
    "ns_makespan_lpt_over_bound",
    "exchange_busiest",
    "exchange_limit",
    "matrices_whole_fraction",
    "row_over_largest",
    "memory_over_ideal",
    "num_buckets",
    "num_matrices",
    "ranks_without_matrix",
    "max_peers",
}


def plan_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_json_has_every_domain_and_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan_json(capsys, "qwen3-30b-a3b", "--dp", "32", "--ep", "8")
    assert set(result["domains"]) == {"dense", "expert"}
    dense, expert, overall = (
        result["domains"]["dense"],
        result["domains"]["expert"],
        result["overall"],
    )
    for values in (dense, expert, overall):
        assert set(values) >= KEYS
    assert result["dp"] == 32
    assert (result["expert_dp"], result["etp"], result["fused"]) == (4, 1, True)
    assert expert["num_matrices"] == 48 * 16 * 2
    assert overall["ns_makespan_over_bound"] == max(
        dense["ns_makespan_over_bound"], expert["ns_makespan_over_bound"]
    )
    assert overall["matrices_whole_fraction"] == dense["matrices_whole_fraction"] < 1
    assert overall["exchange_busiest"] == dense["exchange_busiest"] <= overall["exchange_limit"]
    assert overall["state_bytes"] == dense["state_bytes"] + expert["state_bytes"]
    assert overall["workspace_bytes"] == max(dense["workspace_bytes"], expert["workspace_bytes"])


def test_tables_show_memory_balance_padding_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--dp", "64"]) == 0
    text = capsys.readouterr().out
    for words in (
        "masters and states",
        "gradients",
        "peak workspace",
        "padding",
        "Newton-Schulz makespan",
        "sent: exchange",
        "sent: all-gather",
        "most peers",
    ):
        assert words in text
    assert "llama3-8b (fused): dp 64, tp 1" in text
    assert text.isascii()


def test_bucket_size_and_unfused_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    fused = plan_json(capsys, "gpt2-124m", "--dp", "4")["overall"]
    small = plan_json(capsys, "gpt2-124m", "--dp", "4", "--bucket-size", "8000000")["overall"]
    unfused = plan_json(capsys, "gpt2-124m", "--dp", "4", "--unfused")["overall"]
    assert small["num_buckets"] > fused["num_buckets"]
    assert (fused["num_matrices"], unfused["num_matrices"]) == (48, 72)


def test_a_model_without_matrices_has_no_row_ratio(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text('[{"name": "b", "shape": [7], "kind": "vector"}]')
    overall = plan_json(capsys, str(path), "--dp", "2")["overall"]
    assert overall["row_over_largest"] is None
    assert overall["exchange_busiest"] == 0


def test_model_file_reads_kinds_layers_and_experts(tmp_path: Path) -> None:
    entries = [
        {"name": "emb", "shape": [100, 8], "kind": "embedding", "tied": "words"},
        {"name": "layers.0.conv", "shape": [8, 4, 3, 3], "kind": "conv"},
        {"name": "layers.0.w", "shape": [16, 8], "kind": "matrix", "sharded": False},
        {"name": "layers.1.experts.3.w1", "shape": [4, 8], "kind": "expert_matrix"},
        {"name": "layers.1.mlp.fc1.weight2", "shape": [4, 8], "kind": "expert_matrix"},
        {"name": "layers.1.stack", "shape": [6, 4, 8], "kind": "expert_matrix"},
        {"name": "layers.1.scale", "shape": [], "kind": "vector"},
    ]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(entries))
    read = read_model(path)
    assert [param.layer for param in read] == [None, 0, 0, 1, 1, 1, 1]
    assert [param.expert for param in read] == [None, None, None, 3, 2, None, None]
    assert [param.sharded for param in read] == [True, False, False, True, True, True, False]
    topology = Topology(dp=2, tp=2, ep=2, pp=1, etp=2)
    (stage,) = split_model(read, topology)
    dense = {param.name: param for param in stage["dense"]}
    expert = {param.name: param for param in stage["expert"]}
    assert dense["layers.0.conv"].matrix == (8, 36)
    assert (dense["emb"].numel, dense["emb"].child, dense["emb"].tied) == (400, "adam", "words")
    assert dense["layers.1.scale"].numel == 1
    assert set(expert) == {"layers.1.mlp.fc1.weight2", "layers.1.stack"}
    assert (expert["layers.1.stack"].count, expert["layers.1.stack"].numel) == (3, 3 * 16)


def test_stages_divide_layers_evenly_and_repeat_a_tied_embedding() -> None:
    stages = split_model(model_params(preset("gpt2-124m")), Topology(dp=2, tp=1, ep=1, pp=5, etp=1))
    layers = [
        sorted(
            {p.name.split(".")[2] for p in stage["dense"] if p.name.startswith("decoder.layers")},
            key=int,
        )
        for stage in stages
    ]
    assert [len(each) for each in layers] == [3, 3, 2, 2, 2]
    assert [layer for each in layers for layer in each] == [str(layer) for layer in range(12)]
    tied = [[p.name for p in stage["dense"] if p.tied] for stage in stages]
    assert tied == [
        ["embedding.word_embeddings.weight"],
        [],
        [],
        [],
        ["embedding.word_embeddings.weight"],
    ]
    assert "decoder.final_layernorm.bias" in [p.name for p in stages[-1]["dense"]]


def test_experts_follow_their_own_sizes() -> None:
    params = model_params(preset("qwen3-30b-a3b"), tp=2)
    topology = Topology(dp=8, tp=2, ep=4, pp=1, etp=1)
    assert topology.sizes_of("dense") == (8, 2)
    assert topology.sizes_of("expert") == (4, 1)
    (stage,) = split_model(params, topology)
    fc1 = [p for p in stage["expert"] if "layers.0." in p.name and "fc1" in p.name]
    assert len(fc1) == 32
    assert {p.numel for p in fc1} == {1536 * 2048}
    qkv = next(p for p in stage["dense"] if "linear_qkv" in p.name)
    assert (qkv.numel, qkv.matrix) == (5120 * 2048 // 2, (5120, 2048))


def test_worst_stage_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    whole = plan_json(capsys, "llama3-8b", "--dp", "8")["overall"]
    staged = plan_json(capsys, "llama3-8b", "--dp", "8", "--pp", "4")["overall"]
    assert staged["num_matrices"] == 32
    assert whole["state_bytes"] / 4 < staged["state_bytes"] < whole["state_bytes"]


def test_plot_writes_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "loads.png"
    plan_json(capsys, "qwen3-30b-a3b", "--dp", "4", "--ep", "4", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "gpt2-124m", "--plot", str(tmp_path / "x.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


REFUSED = [
    (("nope",), "unknown preset 'nope'"),
    (("missing.json",), "'missing.json' is not readable JSON"),
    (("gpt2-124m", "--dp", "0"), "dp=0 is below 1"),
    (("gpt2-124m", "--tp", "-1"), "tp=-1 is below 1"),
    (("gpt2-124m", "--bucket-size", "0"), "bucket_size=0 is below 1"),
    (("gpt2-124m", "--pp", "13"), "pp=13 is more than the model's 12 layers"),
    (("gpt2-124m", "--tp", "5"), "has no dimension that tp=5 divides"),
    (("gpt2-124m", "--dp", "2", "--ep", "2"), "ep=2 for a model without experts"),
    (
        ("qwen3-30b-a3b", "--dp", "3", "--ep", "2"),
        "dp * tp = 3 * 1 is not a multiple of ep * etp = 2 * 1",
    ),
    (("qwen3-30b-a3b", "--dp", "3", "--ep", "3"), "ep=3 does not divide the model's 128 experts"),
    (
        ("gpt2-124m", "--plot", "no/such/folder/x.png"),
        "--plot no/such/folder/x.png cannot be written",
    ),
    (("gpt2-124m", "--plot", "x.unknown"), "--plot x.unknown cannot be written"),
]


@pytest.mark.parametrize(("args", "message"), REFUSED)
def test_bad_calls_exit_with_two_and_one_line(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_unfused_is_refused_for_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('[{"name": "w", "shape": [8, 8], "kind": "matrix"}]')
    assert main(["plan", str(path), "--unfused"]) == 2
    assert "--unfused is for presets" in capsys.readouterr().err


TWICE = ", ".join(['{"name": "w", "shape": [1], "kind": "vector"}'] * 2)
BAD_FILES = [
    ("{", "not readable JSON"),
    ("{}", "non-empty JSON list"),
    ("[]", "non-empty JSON list"),
    ("[3]", "entry 0 is 3"),
    ('[{"name": "w"}]', "entry 0 lacks ['shape', 'kind']"),
    ('[{"name": "w", "shape": [1], "kind": "vector", "dtype": 1}]', "unknown ['dtype']"),
    ('[{"name": "", "shape": [1], "kind": "vector"}]', "name=''"),
    ('[{"name": "w", "shape": [1], "kind": "tensor"}]', "kind='tensor'"),
    ('[{"name": "w", "shape": [1], "kind": []}]', "kind=[]"),
    ('[{"name": "w", "shape": [8], "kind": "matrix"}]', "shape=[8]"),
    ('[{"name": "w", "shape": [8, 0], "kind": "matrix"}]', "shape=[8, 0]"),
    ('[{"name": "w", "shape": [8, true], "kind": "matrix"}]', "shape=[8, True]"),
    ('[{"name": "w", "shape": "8x8", "kind": "matrix"}]', "shape='8x8'"),
    ('[{"name": "w", "shape": [8, 8], "kind": "matrix", "sharded": 1}]', "sharded=1"),
    ('[{"name": "w", "shape": [8, 8], "kind": "matrix", "tied": 1}]', "tied=1"),
    (f"[{TWICE}]", "'w' is given twice"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_model_files_are_refused_by_entry(
    text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.experts_w", [8, 8], "needs to know its expert"),
        (
            "layers.0.experts_w",
            [3, 8, 8],
            "ep=2 does not divide the 3 experts of 'layers.0.experts_w'",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    name: str, shape: list[int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps([{"name": name, "shape": shape, "kind": "expert_matrix"}]))
    with pytest.raises(ConfigError, match=message):
        split_model(read_model(path), Topology(dp=2, tp=1, ep=2, pp=1, etp=1))


def test_module_runs_without_processes() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megatron_lw", "plan", "gpt2-124m", "--dp", "8", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["overall"]["exchange_limit"] == 0.05
