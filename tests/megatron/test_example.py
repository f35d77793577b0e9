"""`examples/megatron/pretrain_gpt.py`, run as it is."""

from __future__ import annotations

from pathlib import Path

from tests.megatron import launch, needs

needs.megatron()

SCRIPT = Path(__file__).parents[2] / "examples/megatron/pretrain_gpt.py"
# As its first lines have it, but for the size of the model.
FLAGS = "--bf16 --overlap-grad-reduce --overlap-param-gather --train-iters 10"


def test_the_example_trains() -> None:
    for run in launch.on_ranks(2, "training_cases", "example", str(SCRIPT), FLAGS.split()):
        assert len(run.losses) == 10
        assert run.losses[-1] < run.losses[0] - 0.2


def test_it_is_short_and_two_lines_are_ours() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) < 60
    assert [line for line in lines if "megatron_lw" in line] == [
        "from megatron_lw.integrations import megatron as megatron_lw  # the first line",
        "    megatron_lw.install()  # the second line",
    ]
