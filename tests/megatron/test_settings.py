"""Every field of the installed Megatron's configurations is accounted for, in code and docs."""

from __future__ import annotations

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


def test_overrides_match_as_megatrons_keys_do() -> None:
    [found] = launch.on_ranks(1, "settings_cases", "override_names")
    assert found == [
        {"name": "embedding.weight", "max_lr": 0.5, "optimizer": "adam"},
        {"name": "linear.weight", "optimizer": "muon"},
        {"name": "linear.bias", "wd_mult": 0.0, "optimizer": "adam"},
        {"name": "norm.weight", "wd_mult": 0.0, "optimizer": "adam"},
        {"name": "norm.bias", "wd_mult": 0.0, "optimizer": "adam"},
    ]
