"""Which settings a child starts with."""

from __future__ import annotations

import pytest

import megatron_lw
from megatron_lw.child_names import CHILDREN, MUON_CHILDREN
from megatron_lw.optimizer.child_settings import child_settings


@pytest.mark.parametrize("child", CHILDREN)
def test_muon_clip_grad_exempts_what_is_scale_invariant_and_nothing_else(child):
    config = megatron_lw.OptimizerConfig(optimizer="muon", lr=0.1, muon_clip_grad=False)
    assert child_settings(config, child)["clip_grad"] == (child not in MUON_CHILDREN)
    clipped = megatron_lw.OptimizerConfig(optimizer="muon", lr=0.1)
    assert child_settings(clipped, child)["clip_grad"]
