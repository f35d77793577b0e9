"""The harness itself: order, failures, time limits, deaths, recovery, isolation."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import harness_cases as cases
from tests.harness import RankFailure, RankTimeout, expect_failure_on_all, run_ranks
from tests.pool import Outcome, WorkerPool
from tests.rank import Failure, Success, dumps, qualified_names

ROOT = Path(__file__).resolve().parents[1]


def test_results_come_in_order() -> None:
    results = run_ranks(cases.rank_and_size, 4, 10)
    assert [each[:2] for each in results] == [(10, 4), (11, 4), (12, 4), (13, 4)]


def test_workers_stay_warm_and_are_shared_by_sizes() -> None:
    large = run_ranks(cases.rank_and_size, 4, 0)
    small = run_ranks(cases.rank_and_size, 2, 0)
    assert [each[2] for each in small] == [each[2] for each in large[:2]]
    assert len({each[2] for each in large}) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_collectives(world_size: int) -> None:
    """Bitwise: small integers."""
    for rank, (total, ends, rows) in enumerate(run_ranks(cases.sums, world_size)):
        assert total.tolist() == [world_size * (world_size + 1) / 2] * 3
        at_end = rank in (0, world_size - 1) and world_size > 1
        assert ends.item() == (1 + 2.0 ** (world_size - 1) if at_end else 2.0**rank)
        assert rows.dtype == torch.bfloat16
        assert rows.tolist() == [[r, r] for r in range(world_size)]


@pytest.mark.parametrize("world_size", [0, 9])
def test_world_size_out_of_range(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size={world_size}"):
        run_ranks(cases.sums, world_size)


def test_failure_of_one_rank_leaves_the_pool_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pool.GRACE_SECONDS", 60.0)
    before = run_ranks(cases.rank_and_size, 3, 0)
    with pytest.raises(RankFailure, match="rank 2 failed: ValueError: rank 2 has had") as caught:
        run_ranks(cases.fail_on, 3, 2, "return")
    assert caught.value.rank == 2
    assert "in fail_on" in caught.value.traceback
    assert 'raise ValueError(f"rank {rank}' in str(caught.value)
    assert run_ranks(cases.rank_and_size, 3, 0) == before


@pytest.mark.parametrize("then", ["collective", "loop"])
def test_failure_while_another_rank_waits(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pool.GRACE_SECONDS", 0.1)
    with pytest.raises(RankFailure, match=r"ranks \[0\] were still running") as caught:
        run_ranks(cases.fail_on, 2, 1, then)
    assert not isinstance(caught.value, RankTimeout)
    assert caught.value.rank == 1
    assert len(run_ranks(cases.rank_and_size, 2, 0)) == 2


def failure(when: float, kind: type[Exception], message: str) -> Failure:
    return Failure(when=when, types=qualified_names(kind), message=message, traceback=message)


def test_the_first_error_leads_and_consequences_follow() -> None:
    outcome = Outcome(
        replies={
            0: failure(3.0, ValueError, "late"),
            1: failure(1.0, RuntimeError, "Connection closed by peer [127.0.0.1]:4"),
            2: failure(2.0, RuntimeError, "early"),
            3: Success(value=None),
        },
        finished={2: failure(0.5, ValueError, "after"), 3: failure(4.0, OSError, "closing")},
    )
    assert list(outcome.failures()) == [2, 0, 3, 1]
    assert outcome.failures()[2].message == "early"


def test_timeout_names_ranks_and_shows_stacks() -> None:
    before = run_ranks(cases.rank_and_size, 3, 0)
    with pytest.raises(RankTimeout, match=r"ranks \[1, 2\] did not return within 3 s") as caught:
        run_ranks(cases.hang, 3, timeout=3.0)
    assert caught.value.ranks == [1, 2]
    first, second = str(caught.value).split("--- stacks of rank ")[1:]
    assert "in wait_for_ever" in first
    assert "in barrier" in second
    after = run_ranks(cases.rank_and_size, 2, 0)
    assert {each[2] for each in after}.isdisjoint(each[2] for each in before)


def test_dead_rank_is_named_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank fails first, with gloo's error about a closed connection."""
    monkeypatch.setattr("tests.pool.GRACE_SECONDS", 60.0)
    with pytest.raises(RankFailure, match=r"rank 1 failed: .* died with exit code 23") as caught:
        run_ranks(cases.die_on, 2, 1, 23)
    assert caught.value.rank == 1
    assert "rank 0: RuntimeError" in str(caught.value)
    assert len(run_ranks(cases.rank_and_size, 2, 0)) == 2


def test_crash_shows_the_stack() -> None:
    with pytest.raises(RankFailure, match="died with exit code -11") as caught:
        run_ranks(cases.crash_on, 2, 0)
    assert "Segmentation fault" in caught.value.traceback
    assert "in crash_on" in caught.value.traceback


def test_worker_killed_between_cases_is_replaced() -> None:
    pids = [each[2] for each in run_ranks(cases.rank_and_size, 2, 0)]
    os.kill(pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
    assert [each[:2] for each in run_ranks(cases.rank_and_size, 2, 0)] == [(0, 2), (1, 2)]


def test_expected_failure_on_all() -> None:
    texts = expect_failure_on_all(cases.agree_and_raise, 3, ValueError, "bucket_size", None, "text")
    assert texts == ["bucket_size=3 on 3 ranks"] * 3


@pytest.mark.parametrize(
    ("silent", "kind", "match", "shown"),
    [
        (1, "text", "bucket_size", "--- rank 1 ---\nreturned 7"),
        (None, "type", "bucket_size", "--- rank 2 ---\nTraceback"),
        (None, "text", "nothing like it", "ValueError: bucket_size=3 on 3 ranks"),
    ],
)
def test_expected_failure_that_does_not_come(
    silent: int | None, kind: str, match: str, shown: str
) -> None:
    with pytest.raises(AssertionError, match="not every rank raised") as caught:
        expect_failure_on_all(cases.agree_and_raise, 3, ValueError, match, silent, kind)
    assert shown in str(caught.value)


def test_expected_failure_with_a_rank_left_waiting() -> None:
    with pytest.raises(RankTimeout, match=r"ranks \[0\] did not return") as caught:
        expect_failure_on_all(cases.fail_on, 2, ValueError, "enough", 1, "collective", timeout=3.0)
    assert "rank 1 failed" in str(caught.value)


def test_warnings_are_errors() -> None:
    texts = expect_failure_on_all(cases.warn, 2, UserWarning, "careful", "careful")
    assert texts == ["careful"] * 2


def test_torch_warnings_are_errors_each_time() -> None:
    for _ in range(2):
        expect_failure_on_all(
            cases.torch_warning, 2, UserWarning, "An output with one or more elements"
        )


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("destructor", "lost in a destructor"),
        ("file", "ResourceWarning"),
        ("thread", "from a thread"),
    ],
)
def test_errors_that_python_only_prints_are_failures(where: str, shown: str) -> None:
    with pytest.raises(RankFailure, match=shown):
        run_ranks(cases.leave_noise, 2, where)
    assert len(run_ranks(cases.rank_and_size, 2, 0)) == 2


def test_cases_do_not_leak() -> None:
    clean = run_ranks(cases.surroundings, 3)
    assert [each[:4] for each in clean] == [(None, torch.float32, True, ["world"])] * 3
    for soiled in run_ranks(cases.soil, 3):
        assert all(old != new for old, new in zip(clean[0], soiled, strict=True))
    assert run_ranks(cases.surroundings, 3) == clean


def test_seeds_are_fixed() -> None:
    assert run_ranks(cases.randoms, 2) == run_ranks(cases.randoms, 2)


def test_one_thread_and_gloo() -> None:
    assert run_ranks(cases.threads, 2) == [(1, "1", "gloo")] * 2


def test_tensors_come_back_by_value() -> None:
    given = torch.arange(4.0)
    for got in run_ranks(cases.tensors, 2, given):
        for name, expected in cases.tensors(given).items():
            assert got[name].dtype == expected.dtype, name
            assert got[name].shape == expected.shape, name
            assert got[name].tolist() == expected.tolist(), name
            assert not got[name].is_shared(), name
        got["given"].add_(1)  # writable
    assert len(dumps(Success(value=cases.tensors(given)["view"]))) < 1000


def test_result_that_cannot_be_pickled() -> None:
    with pytest.raises(RankFailure, match="cannot pickle"):
        run_ranks(cases.unpicklable, 2)


def test_function_that_cannot_be_pickled() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        run_ranks(lambda: None, 1)


def test_shutdown_lets_idle_workers_return() -> None:
    pool = WorkerPool()
    call = dumps((cases.rank_and_size, (0,)))
    outcome = pool.run(call, 2, 60.0, stop_at_failure=True)
    assert not outcome.failures()
    assert pool.shutdown() == [0, 0]
    assert pool.pids == []


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from tests.harness import run_ranks\n"
        "from tests.harness_cases import rank_and_size\n"
        "if __name__ == '__main__':\n"
        "    print(*[each[2] for each in run_ranks(rank_and_size, 2, 0)], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent cannot remove its folder
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    # The pipe that the workers had inherited is at its end, so every one of them has closed it.
    assert len(done.stdout.split()) == 2
