"""The promises of the design for every preset, dense and expert domains each by itself.

Padding, makespan, exchange and memory are exact functions of the plan; none of this is timed.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from megatron_lw.cli.topology import split_model
from megatron_lw.optimizer.plan import PlanMetrics, plan_domain
from megatron_lw.presets import PRESETS, ModelParam, model_params, preset
from megatron_lw.topology import Topology

SIZES = (8, 32, 64, 128, 512)


@lru_cache(maxsize=1)
def model_of(name: str, fused: bool, tp: int) -> list[ModelParam]:
    """The whole model, made once for all sizes of one kind."""
    return list(model_params(preset(name), fused=fused, tp=tp))


def metrics_of(name: str, *, fused: bool, dp: int, ep: int = 1, pp: int = 1) -> list[PlanMetrics]:
    tp = 8 if name == "llama3-70b" else 1
    topology = Topology(dp=dp, tp=tp, ep=ep, pp=pp, etp=tp)
    return [
        plan_domain(
            params,
            domain=domain,
            dp=topology.sizes_of(domain)[0],
            tp=topology.sizes_of(domain)[1],
        ).metrics()
        for stage in split_model(model_of(name, fused, tp), topology)
        for domain, params in stage.items()
    ]


def check_promises(metrics: PlanMetrics, dp: int, tp: int) -> None:
    assert metrics.num_matrices > 0
    assert metrics.padding <= metrics.padding_limit
    if metrics.numel >= 1e5 * dp:
        assert metrics.padding_fraction < 0.001
    assert metrics.ns_makespan_over_bound <= max(1.05, metrics.ns_makespan_lpt_over_bound)
    assert metrics.exchange_busiest <= metrics.exchange_limit
    if dp > 1 and metrics.row_over_largest >= 2:
        assert metrics.exchange_busiest <= 0.4 / dp
    assert metrics.tp_exchange_fraction <= (tp - 1) / tp
    assert metrics.memory_over_ideal <= 1.02


@pytest.mark.parametrize("dp", SIZES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_the_promises(name: str, fused: bool, dp: int) -> None:
    found = metrics_of(name, fused=fused, dp=dp)
    domains = ["dense", "expert"] if preset(name).experts else ["dense"]
    assert sorted(metrics.domain for metrics in found) == domains
    for metrics in found:
        check_promises(metrics, dp, 8 if name == "llama3-70b" else 1)


@pytest.mark.parametrize(("ep", "pp"), [(8, 4), (64, 16)])
def test_stages_and_shares_of_experts_keep_the_promises(ep: int, pp: int) -> None:
    for metrics in metrics_of("deepseek-v3", fused=True, dp=64, ep=ep, pp=pp):
        check_promises(metrics, 64 // ep if metrics.domain == "expert" else 64, 1)


def test_a_plan_for_one_rank_exchanges_nothing() -> None:
    (metrics,) = metrics_of("llama3-8b", fused=True, dp=1)
    check_promises(metrics, 1, 1)
    assert (metrics.exchange_busiest, metrics.exchange_limit, metrics.max_peers) == (0.0, 0.0, 0)


def test_models_with_room_have_six_buckets_of_matrices() -> None:
    for name, dp in (
        ("llama3-8b", 8),
        ("llama3-8b", 512),
        ("llama3-70b", 128),
        ("deepseek-v3", 64),
    ):
        for metrics in metrics_of(name, fused=True, dp=dp):
            assert metrics.num_buckets >= 6


def test_the_grid_sees_both_cut_and_whole_matrices_and_idle_ranks() -> None:
    """Without these the promises above would be kept by plans that never exchange."""
    (small,) = metrics_of("gpt2-124m", fused=True, dp=512)
    assert small.matrices_whole_fraction == 0.0
    assert small.ranks_without_matrix > 0
    assert small.exchange_busiest > 0
    dense, expert = metrics_of("qwen3-30b-a3b", fused=True, dp=8)
    assert expert.matrices_whole_fraction == 1.0
    assert dense.row_over_largest < 2 <= expert.row_over_largest
