"""Work is queued on the caller's stream, whichever it is, behind what was queued there before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.cases import Bag, initial_values, integer_grads, relative
from tests.gpu.wrapped import wrap

SHAPES = {"a_weight": (256, 384), "b_weight": (384, 128), "c_bias": (5000,)}
CONFIG = {
    "optimizer": "muon", "lr": 0.1, "clip_grad": 1.0, "muon_fp32_matmul_prec": "highest",
}  # fmt: skip
CYCLES = 20_000_000
"""About ten milliseconds; whoever reads on another stream is long done by then."""


def trained(cycles: int, overlap: bool) -> dict[str, torch.Tensor]:
    """Three steps on the current stream, each stage behind a kernel of so many cycles."""

    def delay() -> None:
        if cycles:
            torch.cuda._sleep(cycles)

    model = Bag({}, torch.float32)
    delay()
    for name, value in initial_values(SHAPES).items():
        model.register_parameter(name, nn.Parameter(value.cuda().clone()))
    ddp, optimizer = wrap(model, CONFIG, overlap=overlap)
    for step in range(3):
        grads = {name: grad.cuda() for name, grad in integer_grads(SHAPES, 0, step).items()}
        delay()
        optimizer.zero_grad()
        ddp(grads).backward()
        delay()
        optimizer.step()
    return {name: tensor.detach().cpu() for name, tensor in ddp.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_b6_a_side_stream_behind_long_kernels_gives_the_same(overlap: bool) -> None:
    """NVIDIA/Megatron-LM#3693: it waited for the default stream, not the current one.

    Adam's weights are equal bit by bit; a matrix product may be summed in another order, and Muon's
    are within 1e-5.
    """
    plain = trained(0, overlap)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = trained(CYCLES, overlap)
    start = initial_values(SHAPES)
    for name, weight in plain.items():
        assert not torch.equal(weight, start[name]), name
        if name.endswith("bias"):
            assert torch.equal(found[name], weight), name
        else:
            assert relative(found[name], weight) < 1e-5, name
