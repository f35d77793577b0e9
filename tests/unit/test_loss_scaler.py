"""Loss scaling: Megatron's rules as sequences of updates worked out by hand, states, refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_lw import ConfigError, StateError
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.loss_scaler import (
    MAX_SCALE,
    ConstantScaler,
    DynamicScaler,
    make_scaler,
)


def scales_after(scaler, steps):
    """The scale after each step; "x" is a step with an overflow, "." one without."""
    found = []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


# Window 3, hysteresis 2, from 16, at least 4. What each row shows stands before it.
SEQUENCES = [
    ("three clean steps double", "...", [16, 16, 32]),
    ("and each three after them", "......", [16, 16, 32, 32, 32, 64]),
    ("the first overflow is borne", "x", [16]),
    ("the second is not", "xx", [16, 8]),
    ("nor any after it", "xxx", [16, 8, 4]),
    ("the minimum holds", "xxxxx", [16, 8, 4, 4, 4]),
    ("an overflow restarts the window", "..x..", [16, 16, 16, 16, 16]),
    ("which then is whole again", "..x...", [16, 16, 16, 16, 16, 32]),
    ("clean steps do not refill the reserve", "x.x", [16, 16, 8]),
    ("nor after it is used up", "xx..x", [16, 8, 8, 8, 4]),
    ("growth refills it", "x...x", [16, 16, 16, 32, 32]),
    ("to the full", "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    ("a long reserve of overflows counts once", "xxxx...x", [16, 8, 4, 4, 4, 4, 8, 8]),
]


@pytest.mark.parametrize(("steps", "expected"), [s[1:] for s in SEQUENCES], ids=lambda v: str(v))
def test_megatrons_rules(steps, expected):
    scaler = DynamicScaler(initial_scale=16.0, min_scale=4.0, window=3, hysteresis=2)
    assert scales_after(scaler, steps) == expected


@pytest.mark.parametrize(
    ("hysteresis", "expected"),
    [(1, [8, 4, 2, 1, 1]), (2, [16, 8, 4, 2, 1]), (4, [16, 16, 16, 8, 4])],
)
def test_hysteresis_is_the_number_of_overflows_until_the_first_fall(hysteresis, expected):
    scaler = DynamicScaler(initial_scale=16.0, window=3, hysteresis=hysteresis)
    assert scales_after(scaler, "xxxxx") == expected


def test_megatrons_defaults():
    scaler = make_scaler(fp16=True)
    assert scaler.scale == 2.0**32
    assert (
        scales_after(scaler, "x" * 40) == [2.0**32] + [2.0**e for e in range(31, 0, -1)] + [1.0] * 8
    )
    assert set(scales_after(scaler, "." * 999)) == {1.0}
    assert scales_after(scaler, ".") == [2.0]


def test_growth_ends_where_the_inverse_leaves_fp32s_normal_numbers():
    scaler = DynamicScaler(initial_scale=2.0**124, window=1)
    assert scales_after(scaler, "....") == [2.0**125, 2.0**126, MAX_SCALE, MAX_SCALE]
    assert scaler.inverse_scale == torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("exponent", [-126, -3, 0, 16, 126])
def test_scaling_and_unscaling_round_nothing(exponent):
    """Bitwise in fp32, for values that stay normal numbers."""
    scaler = ConstantScaler(2.0**exponent)
    values = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(values * scaler.scale * scaler.inverse_scale, values)
    assert scaler.scale * scaler.inverse_scale == 1.0


def test_constant_scale_never_moves():
    scaler = make_scaler(fp16=True, loss_scale=128)
    assert scales_after(scaler, "xx." * 700) == [128.0] * 2100


@pytest.mark.parametrize("loss_scale", [None, 64.0])
def test_without_fp16_the_scale_is_constant(loss_scale):
    scaler = make_scaler(fp16=False, loss_scale=loss_scale)
    assert isinstance(scaler, ConstantScaler)
    assert scaler.scale == (loss_scale or 1.0)


def test_settings_reach_the_scaler():
    scaler = make_scaler(
        fp16=True,
        initial_loss_scale=8.0,
        min_loss_scale=2.0,
        loss_scale_window=2.0,
        hysteresis=1,
        max_consecutive_skips=4,
    )
    assert scales_after(scaler, "..xxx") == [8, 16, 8, 4, 2]
    with pytest.raises(StateError, match=r"in 4 steps in a row \(max_consecutive_skips=4\)"):
        scaler.update(True)


# The limit of skips.


def skips_until_refused(scaler, most=1000):
    for count in range(1, most + 1):
        try:
            scaler.update(True)
        except StateError as error:
            return count, str(error)
    return None, ""


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("kind", [ConstantScaler, DynamicScaler])
def test_a_row_of_skips_ends_in_an_error_with_scale_and_count(kind, limit):
    scaler = kind(max_consecutive_skips=limit)
    count, message = skips_until_refused(scaler)
    assert count == limit
    assert f"{limit} steps in a row" in message and f"scale is now {scaler.scale:g}" in message
    assert skips_until_refused(scaler)[0] == 1  # told again, not once
    scaler.update(False)
    assert skips_until_refused(scaler)[0] == limit


def test_only_a_row_counts():
    scaler = DynamicScaler(max_consecutive_skips=3)
    scales_after(scaler, "xx." * 50)
    assert scaler.consecutive_skips == 0
    scales_after(scaler, "xx")
    assert scaler.consecutive_skips == 2


def test_the_default_limit_leaves_room_for_the_way_down_from_the_start():
    assert skips_until_refused(make_scaler(fp16=True))[0] == 100
    assert scales_after(make_scaler(fp16=True), "x" * 33)[-2:] == [2.0, 1.0]


def test_none_sets_no_limit():
    assert skips_until_refused(DynamicScaler(max_consecutive_skips=None))[0] is None


def test_the_remedy_fits():
    assert "lower loss_scale" in skips_until_refused(ConstantScaler(4.0))[1]
    assert (
        "lower initial_loss_scale" in skips_until_refused(DynamicScaler(max_consecutive_skips=5))[1]
    )
    assert "cannot fall further" in skips_until_refused(DynamicScaler())[1]


# States.


@pytest.mark.parametrize("before", ["", "x", "xx", "xx..", "...xx.", "x....."])
@pytest.mark.parametrize("after", ["x", "...", "xxx", "..x...xx"])
def test_a_loaded_scaler_goes_on_as_the_saved_one(before, after):
    settings = {"initial_scale": 16.0, "window": 3}
    saved, loaded = DynamicScaler(**settings), DynamicScaler(**settings)
    scales_after(saved, before)
    loaded.load(json.loads(json.dumps(saved.state())))
    assert loaded.state() == saved.state()
    assert scales_after(loaded, after) == scales_after(saved, after)
    assert loaded.state() == saved.state()


def test_states_are_plain():
    dynamic = DynamicScaler(initial_scale=4.0)
    dynamic.update(True)
    assert dynamic.state() == {
        "kind": "dynamic",
        "scale": 4.0,
        "growth_tracker": 0,
        "hysteresis_tracker": 1,
        "consecutive_skips": 1,
    }
    constant = ConstantScaler(4.0)
    constant.update(True)
    assert constant.state() == {"kind": "constant", "scale": 4.0, "consecutive_skips": 1}
    other = ConstantScaler(8.0)
    other.load(constant.state())
    assert (other.scale, other.consecutive_skips) == (8.0, 1)


def state_after(steps, **settings):
    scaler = DynamicScaler(**settings)
    scales_after(scaler, steps)
    return scaler.state()


def test_new_settings_hold_after_a_load():
    """A shorter window, a higher minimum, a smaller reserve."""
    shorter = DynamicScaler(initial_scale=16.0, window=3)
    shorter.load(state_after("." * 8, initial_scale=16.0, window=10))
    assert scales_after(shorter, "....") == [32, 32, 32, 64]
    higher = DynamicScaler(initial_scale=16.0, min_scale=8.0)
    higher.load(state_after("xxx", initial_scale=16.0))
    assert higher.scale == 8.0
    smaller = DynamicScaler(initial_scale=16.0, hysteresis=1)
    smaller.load(state_after("", initial_scale=16.0, hysteresis=5))
    assert scales_after(smaller, "x") == [8]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "constant"}, "kind is 'constant', this run's 'dynamic'"),
        ({"kind": None}, "'kind' is missing|kind is None"),
        ({"scale": 3.0}, "scale=3.0 is not a power of two"),
        ({"scale": math.inf}, "scale=inf"),
        ({"scale": "4"}, "scale='4'"),
        ({"growth_tracker": -1}, "growth_tracker=-1"),
        ({"hysteresis_tracker": 1.5}, "hysteresis_tracker=1.5"),
        ({"consecutive_skips": "1"}, "consecutive_skips='1'"),
        ({"period": 3}, "'period' is not a key of the state of a dynamic scaler"),
    ],
)
def test_an_impossible_state_is_refused_by_name_and_changes_nothing(change, match):
    scaler = DynamicScaler(initial_scale=16.0)
    scaler.update(True)
    before = scaler.state()
    with pytest.raises(CheckpointError, match=match):
        scaler.load({**state_after("xx", initial_scale=8.0), **change})
    assert scaler.state() == before


@pytest.mark.parametrize("key", ["scale", "growth_tracker", "consecutive_skips"])
def test_a_missing_key_is_named(key):
    state = state_after("")
    del state[key]
    with pytest.raises(CheckpointError, match=f"'{key}' is missing from the state"):
        DynamicScaler().load(state)


# Settings out of range.


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss_scale": 1000.0}, r"loss_scale=1000.0 is not .* \(give 512 or 1024\)"),
        ({"loss_scale": 0.3}, r"loss_scale=0.3 is not .* \(give 0.25 or 0.5\)"),
        ({"loss_scale": 0.0}, "loss_scale=0.0 is not"),
        ({"loss_scale": -2.0}, "loss_scale=-2.0 is not"),
        ({"initial_loss_scale": math.inf}, "initial_loss_scale=inf is not"),
        ({"initial_loss_scale": math.nan}, "initial_loss_scale=nan is not"),
        ({"initial_loss_scale": 2.0**127}, "initial_loss_scale=.* from 2"),
        ({"min_loss_scale": 3.0}, "min_loss_scale=3.0"),
        ({"initial_loss_scale": 2.0, "min_loss_scale": 4.0}, "min_loss_scale=4 is above"),
        ({"loss_scale_window": 0}, "loss_scale_window=0; give"),
        ({"loss_scale_window": 2.5}, "loss_scale_window=2.5; give a whole number"),
        ({"hysteresis": 0}, "hysteresis=0; give"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=0; give"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, match):
    with pytest.raises(ConfigError, match=match):
        make_scaler(fp16=True, **settings)
