"""Every field of the installed Megatron's configurations is accounted for, in code and docs."""

from __future__ import annotations

import pytest

from tests.megatron import launch, needs
from tests.megatron.settings_page import PAGE, renewed

needs.megatron()


def test_the_page_lists_every_field_of_the_installed_version() -> None:
    [tables] = launch.on_ranks(1, "settings_cases", "table")
    assert renewed(PAGE.read_text(), tables) == PAGE.read_text(), "run `make megatron-page`"
    assert tables.count("\n| `") > 90


def test_honoured_values_carry_over() -> None:
    [found] = launch.on_ranks(1, "settings_cases", "carried")
    assert {field: problem for field, problem in found.items() if problem} == {}
    assert len(found) > 30


def test_what_is_refused_is_named_with_its_value() -> None:
    [found] = launch.on_ranks(1, "settings_cases", "refused")
    assert [field for field, message in found.items() if f"{field}=" not in message] == []


def test_a_number_of_buckets_becomes_their_size() -> None:
    assert launch.on_ranks(1, "settings_cases", "buckets") == [1000]


@pytest.mark.parametrize(
    ("optimizer", "rest"),
    [("muon", "lion"), ("adaptive_muon", "lion"), ("soap", "adam"), ("lion", "adam")],
)
def test_overrides_match_as_megatrons_keys_do(optimizer: str, rest: str) -> None:
    """And every optimizer that Megatron calls emerging has the matrices, and no more."""
    [found] = launch.on_ranks(1, "settings_cases", "override_names", optimizer, "lion")
    assert found == [
        {"name": "embedding.weight", "max_lr": 0.5, "optimizer": rest},
        {"name": "linear.weight", "optimizer": optimizer},
        {"name": "linear.bias", "wd_mult": 0.0, "optimizer": rest},
        {"name": "norm.weight", "wd_mult": 0.0, "optimizer": rest},
        {"name": "norm.bias", "wd_mult": 0.0, "optimizer": rest},
    ]


def test_decay_rates_of_a_main_lion_are_adams() -> None:
    [(plain, warned)] = launch.on_ranks(1, "settings_cases", "lions_rates")
    assert plain == ((0.9, 0.5), [])
    rates, [message] = warned
    assert rates == (0.9, 0.5)
    assert "lion_beta2=0.25 has no effect" in message
    assert "adam_beta2=0.5" in message
