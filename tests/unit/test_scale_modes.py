"""What an orthogonal matrix is multiplied with, by mode: numbers worked out by hand."""

from __future__ import annotations

import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.children.muon import scale_factor


@pytest.mark.parametrize(
    "shape, mode, expected",
    [
        ((4, 9), "spectral", 3.0),
        ((9, 4), "spectral", 3.0),
        ((4, 9), "unit_rms_norm", 2 / 3),
        ((9, 4), "unit_rms_norm", 1.5),
        ((4, 9), "shape_scaling", 1.0),
        ((9, 4), "shape_scaling", 1.5),
    ],
)
def test_rows_and_columns_have_their_places(shape, mode, expected):
    """Bitwise."""
    assert scale_factor(*shape, mode) == expected


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="scale_mode = 'rms' is unknown"):
        scale_factor(4, 9, "rms")
