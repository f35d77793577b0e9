"""Keys and overrides: what matches, what contradicts, and the standard ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from megatron_lw.config import OptimizerConfig
from megatron_lw.errors import ConfigError
from megatron_lw.overrides import (
    OVERRIDE_FIELDS,
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    check_overrides,
    combine_overrides,
    standard_overrides,
)

VECTOR = torch.nn.Parameter(torch.zeros(4))
MATRIX = torch.nn.Parameter(torch.zeros(4, 4))
WIDE = ParamPredicate("wide", lambda param: param.shape[-1] > 3)
NEVER = ParamPredicate("never", lambda param: False)
NOT_HEAD = ParamWithNamePredicate("not_head", lambda param, name: "head" not in name)


def no_attribute(name: str) -> bool:
    return False


def is_embedding(name: str) -> bool:
    return name == "is_embedding_or_output_parameter"


def overrides_of(
    overrides: Mapping[ParamKey, ParamGroupOverride],
    name: str,
    param: torch.nn.Parameter,
    has_attribute: Any = no_attribute,
) -> ParamGroupOverride:
    matched = [(k, o) for k, o in overrides.items() if k.matches(name, param, has_attribute)]
    return combine_overrides(name, matched)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (ParamKey(name="layers.0.weight"), True),
        (ParamKey(name="layers.*.weight"), True),
        (ParamKey(name="weight"), False),
        (ParamKey(name="LAYERS.*"), False),
        (ParamKey(name=("nothing", "*.weight")), True),
        (ParamKey(name="layers.[1-9].*"), False),
        (ParamKey(attr="is_embedding_or_output_parameter"), True),
        (ParamKey(attr=("is_qkv", "is_embedding_or_output_parameter")), True),
        (ParamKey(attr="is_qkv"), False),
        (ParamKey(predicate=WIDE), True),
        (ParamKey(predicate=NEVER), False),
        (ParamKey(predicate=(NEVER, WIDE)), True),
        (ParamKey(with_name_predicate=NOT_HEAD), True),
        (ParamKey(name="nothing", attr="is_qkv", predicate=NEVER), False),
        (ParamKey(name="nothing", attr="is_qkv", predicate=(NEVER, WIDE)), True),
        (ParamKey(name="nothing", with_name_predicate=(NOT_HEAD,)), True),
    ],
    ids=str,
)
def test_a_key_matches_if_any_part_of_it_does(key: ParamKey, expected: bool) -> None:
    assert key.matches("layers.0.weight", MATRIX, is_embedding) is expected


def test_a_predicate_given_the_name_sees_the_name() -> None:
    key = ParamKey(with_name_predicate=NOT_HEAD)
    assert not key.matches("head.weight", MATRIX, no_attribute)


def test_predicates_and_keys_compare_hash_and_print_by_name() -> None:
    same = ParamKey(predicate=ParamPredicate("wide", lambda param: False))
    assert same == ParamKey(predicate=WIDE)
    assert len({same: 1, ParamKey(predicate=WIDE): 2}) == 1
    assert ParamKey(predicate=WIDE) != ParamKey(predicate=NEVER)
    key = ParamKey(name=("a", "b"), predicate=WIDE, with_name_predicate=(NOT_HEAD,))
    assert str(key) == "ParamKey(name=a, b; predicate=wide; with_name_predicate=not_head)"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "ParamKey() selects no parameter; give name"),
        ({"name": ["*.bias"]}, "ParamKey.name=(['*.bias'],) is not made of str"),
        ({"attr": (3,)}, "ParamKey.attr=(3,) is not made of str"),
        ({"predicate": NOT_HEAD}, "a tuple of them"),
        ({"with_name_predicate": WIDE}, "is not made of ParamWithNamePredicate"),
    ],
)
def test_a_key_of_nothing_or_of_another_type_is_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ParamKey(**parts)
    assert words in str(error.value)


def test_overrides_that_agree_or_touch_different_fields_combine() -> None:
    by_name, by_shape = ParamKey(name="*.weight"), ParamKey(predicate=WIDE)
    combined = combine_overrides(
        "layers.0.weight",
        [
            (by_name, ParamGroupOverride(wd_mult=0.0, max_lr=0.1)),
            (by_shape, ParamGroupOverride(optimizer="adam", max_lr=0.1)),
        ],
    )
    assert combined == {"wd_mult": 0.0, "max_lr": 0.1, "optimizer": "adam"}
    assert combine_overrides("layers.0.weight", []) == {}


def test_overrides_that_disagree_name_the_parameter_the_field_and_both_keys() -> None:
    given = ParamGroupOverride(wd_mult=0.0)
    with pytest.raises(ConfigError) as error:
        combine_overrides(
            "layers.0.weight",
            [
                (ParamKey(name="*.weight"), given),
                (ParamKey(name="other"), ParamGroupOverride(max_lr=0.1)),
                (ParamKey(predicate=WIDE), ParamGroupOverride(wd_mult=0.5)),
            ],
        )
    assert str(error.value) == (
        "layers.0.weight: wd_mult is 0.0 by ParamKey(name=*.weight) and 0.5 by "
        "ParamKey(predicate=wide); make the two agree, or let only one of them match "
        "layers.0.weight"
    )
    assert given == {"wd_mult": 0.0}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            {"betas": (0.9, 0.9)},
            "sets betas=(0.9, 0.9), which cannot be overridden; these can: max_lr",
        ),
        ({"eps": 0.0}, "sets eps=0.0, which is not a finite number > 0"),
        ({"wd_mult": -1.0}, "sets wd_mult=-1.0, which is not a finite number >= 0"),
        ({"max_lr": None}, "sets max_lr=None, which is not a finite number >= 0"),
        ({"optimizer": "adamw"}, "sets optimizer='adamw', which is not one of 'adam', 'lion', "),
        ({"weight_decay_mode": "palm"}, "sets weight_decay_mode='palm', which is not one of "),
    ],
)
def test_an_unknown_field_or_value_of_an_override_is_refused(
    override: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=r"override of ParamKey\(name=x\)") as error:
        check_overrides({ParamKey(name="x"): cast(ParamGroupOverride, override)})
    assert words in str(error.value)


def test_every_field_of_an_override_has_its_allowed_values() -> None:
    assert list(OVERRIDE_FIELDS) == list(ParamGroupOverride.__annotations__)


@pytest.mark.parametrize("decoupled", [None, 0.3])
@pytest.mark.parametrize("qk", [False, True])
def test_the_standard_overrides_spare_vectors_and_biases_from_decay(
    decoupled: float | None, qk: bool
) -> None:
    config = OptimizerConfig(lr=0.1, decoupled_lr=decoupled, apply_wd_to_qk_layernorm=qk)
    overrides = standard_overrides(config)
    check_overrides(overrides)
    spared = {"wd_mult": 0.0}
    assert overrides_of(overrides, "layers.0.weight", MATRIX) == {}
    assert overrides_of(overrides, "norm.weight", VECTOR) == spared
    assert overrides_of(overrides, "experts.bias", MATRIX) == spared
    assert overrides_of(overrides, "attn.q_layernorm.weight", VECTOR) == ({} if qk else spared)
    assert overrides_of(overrides, "attn.k_layernorm.bias", VECTOR) == ({} if qk else spared)
    own_lr = {} if decoupled is None else {"max_lr": decoupled}
    assert overrides_of(overrides, "embedding.weight", MATRIX, is_embedding) == own_lr
    assert overrides_of(overrides, "head.bias", VECTOR, is_embedding) == {**own_lr, **spared}


def test_the_lower_end_of_the_decoupled_schedule_is_set_where_given() -> None:
    overrides = standard_overrides(OptimizerConfig(decoupled_lr=0.3, decoupled_min_lr=0.1))
    assert overrides_of(overrides, "head.weight", MATRIX, is_embedding) == {
        "max_lr": 0.3,
        "min_lr": 0.1,
    }
