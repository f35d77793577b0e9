"""The text and the batches of the examples, and their model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.unit.example_modules import example

data = example("data")
gpt = example("gpt")


def source(**changes: object) -> object:
    settings = {
        "text": torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).byte(),
        "global_batch": 12,
        "micro_batches": 2,
        "sequence": 16,
        "rank": 0,
        "ranks": 1,
        "seed": 7,
    }
    return data.BatchSource(**(settings | changes))


def rows(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for tokens, _ in batches for row in tokens]


def test_standard_library_text_is_found_and_split_by_whole_files() -> None:
    files = data.standard_library_files()
    corpus = data.load_corpus([], 256)
    held_out = b"".join(path.read_bytes() for path in files if data.is_held_out(path.name))
    assert not any("encodings" in path.parts or "test" in path.parts for path in files)
    assert bytes(corpus.held_out.tolist()) == held_out
    total = sum(path.stat().st_size for path in files)
    assert corpus.train.numel() + corpus.held_out.numel() == total
    assert 0.02 * total < corpus.held_out.numel() < 0.15 * total
    assert corpus.train.dtype == torch.uint8


def test_one_file_in_twenty_is_held_out() -> None:
    count = sum(data.is_held_out(f"module_{index}.py") for index in range(10_000))
    assert 400 < count < 600


def test_own_files_hold_out_their_ends(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"a" * 190 + b"A" * 10)
    second.write_bytes(b"b" * 380 + b"B" * 20)
    corpus = data.load_corpus([first, second], 16)
    assert bytes(corpus.train.tolist()) == b"a" * 190 + b"b" * 380
    assert bytes(corpus.held_out.tolist()) == b"A" * 10 + b"B" * 20


@pytest.mark.parametrize(
    ("length", "sequence", "message"),
    [
        (0, 8, r"the training text has 0 bytes"),
        (100, 200, r"the training text has 95 bytes: .* --sequence 200"),
        (100, 8, r"the held-out text has 5 bytes: .* --sequence 8"),
    ],
)
def test_too_little_text(tmp_path: Path, length: int, sequence: int, message: str) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * length)
    with pytest.raises(data.DataError, match=message):
        data.load_corpus([path], sequence)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(data.DataError, match=f"--data {path}: "):
            data.load_corpus([path], 8)


def test_unigram_entropy_of_known_frequencies() -> None:
    """Numerical: fp64 sums of known terms."""
    uniform = torch.arange(256).repeat(3).to(torch.uint8)
    assert data.unigram_entropy(uniform) == pytest.approx(math.log(256), abs=1e-12)
    assert data.unigram_entropy(torch.full((9,), 65, dtype=torch.uint8)) == 0.0
    quarter = torch.tensor([1, 2, 2, 2], dtype=torch.uint8)
    expected = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert data.unigram_entropy(quarter) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_the_global_batch_of_one_process(ranks: int) -> None:
    """Bitwise: the same sequences, each once, in equal micro-batches."""
    whole = rows(source(global_batch=24, micro_batches=1).step(5))
    parts = [source(rank=rank, ranks=ranks, global_batch=24).step(5) for rank in range(ranks)]
    assert len(set(whole)) == 24
    assert sorted(row for part in parts for row in rows(part)) == sorted(whole)
    assert {tuple(x.shape) for part in parts for x, _ in part} == {(12 // ranks, 16)}
    assert {len(part) for part in parts} == {2}


def test_batches_follow_seed_and_step_alone() -> None:
    first = rows(source().step(3))
    assert rows(source().step(3)) == first
    assert rows(source().step(4)) != first
    assert rows(source(seed=8).step(3)) != first


def test_targets_are_the_next_bytes() -> None:
    text = torch.randint(256, (500,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tokens, targets = data.windows(text, [0, 31, 500 - 17], 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert targets[2, -1] == text[-1]


def test_every_start_can_be_drawn_and_none_runs_over_the_end() -> None:
    starts = data.draw_starts(20, 2000, 16, seed=0, step=0)
    assert set(starts) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 10, "ranks": 3}, r"--global-batch 10 .* 2 x 3 data-parallel ranks"),
        ({"global_batch": 0}, r"--global-batch 0"),
        ({"micro_batches": 0}, r"--micro-batches 0"),
    ],
)
def test_batch_sizes_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(data.DataError, match=message):
        source(**changes)


@pytest.mark.parametrize(("numel", "count"), [(17, 1), (1000, 6), (16 * 5 + 1, 99), (16 * 5, 99)])
def test_held_out_windows_are_disjoint_and_shared_evenly(numel: int, count: int) -> None:
    text = torch.arange(numel).to(torch.int16)  # wider than a byte, so that positions are unique
    expected = min(count, (numel - 1) // 16)
    for ranks in (1, 2, 3):
        if expected < ranks:
            with pytest.raises(data.DataError, match=f"{ranks} ranks cannot have a held-out"):
                source(ranks=ranks).held_out(text, count)
            continue
        parts = [rows(source(rank=r, ranks=ranks).held_out(text, count)) for r in range(ranks)]
        positions = [position for part in parts for row in part for position in row]
        assert {len(part) for part in parts} == {expected // ranks}
        assert len(set(positions)) == len(positions) == expected // ranks * ranks * 16
        assert max(positions) < numel - 1


def small_model(**changes: object) -> torch.nn.Module:
    """A model with no zero weights, so that every path carries something."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 32, "heads": 2, "sequence": 24, "dtype": torch.float32}
    model: torch.nn.Module = gpt.GPT(gpt.GPTConfig(**(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def test_model_does_not_look_ahead() -> None:
    """Bitwise: later bytes change nothing before them, and do change what comes after."""
    model = small_model()
    tokens = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = tokens.roll(-1, 1), tokens.roll(-1, 1)
    before[:, 10:] = -100  # cross_entropy's mark for a position that does not count
    after[:, :10] = -100
    assert torch.equal(model(tokens, before), model(changed, before))
    assert not torch.equal(model(tokens, after), model(changed, after))


def test_model_starts_near_the_uniform_loss_with_one_weight_if_tied() -> None:
    """Numerical: the output layer starts small, so the logits do."""
    tokens = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(1))
    names = {}
    for tied in (False, True):
        torch.manual_seed(0)
        config = gpt.GPTConfig(layers=2, width=32, heads=2, sequence=24, tied=tied)
        model = gpt.GPT(config)
        names[tied] = {name for name, _ in model.named_parameters()}
        assert model(tokens, tokens.roll(-1, 1)).item() == pytest.approx(math.log(256), abs=0.1)
    assert names[False] - names[True] == {"head.weight"}


def test_rotation_depends_on_distance_alone() -> None:
    """Numerical: fp32 products of the same angle difference."""
    cos, sin = gpt.rotary_tables(40, 8)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    turned = [gpt.rotate(x.expand(40, 8), cos, sin) for x in (query, key)]
    scores = turned[0] @ turned[1].T
    assert torch.allclose(scores.diagonal(-7), scores[7, 0].expand(33), atol=1e-5)
    assert not torch.allclose(scores[:, 0], scores[0, 0].expand(40), atol=1e-2)


@pytest.mark.parametrize(
    ("sizes", "message"), [({"layers": 0}, "layers is 0"), ({"heads": 3}, "multiple of 2 x heads")]
)
def test_model_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpt.GPTConfig(**sizes)
