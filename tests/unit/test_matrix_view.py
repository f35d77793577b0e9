"""Which matrices a parameter is, and that all stages take it for the same. One process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw import ConfigError
from megatron_lw.optimizer.describe import describe
from megatron_lw.optimizer.matrix_view import MatrixView, matrix_view
from tests.distributed.cases import build, initial_values, integer_grads, relative
from tests.reference import Reference, Settings

SINGLE = megatron_lw.ParallelGroups.single()
MUON = {"optimizer": "muon", "lr": 0.05, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
Tags = dict[str, dict[str, Any]]


def view_of(shape: tuple[int, ...], **tags: Any) -> MatrixView:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape))
    megatron_lw.annotate(model.weight, **tags)
    [info] = describe([model], SINGLE).infos
    return matrix_view(info)


def trained(
    shapes: dict[str, Any], tags: Tags | None = None, grads: Any = None, **settings: Any
) -> dict[str, torch.Tensor]:
    ddp, optimizer = build(shapes, {**MUON, **settings}, tags=tags, groups=SINGLE)
    for step in range(2):
        optimizer.zero_grad()
        ddp((grads or integer_grads)(shapes, 0, step)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def reference(shapes: dict[str, Any], settings: dict[str, Settings]) -> dict[str, torch.Tensor]:
    plain = Reference(initial_values(shapes), settings)
    for step in range(2):
        plain.step(integer_grads(shapes, 0, step))
    return plain.masters


@pytest.mark.parametrize(
    ("shape", "tags", "count", "shapes", "unused"),
    [
        ((24, 40), {}, 1, [(24, 40)], 0),
        ((8, 4, 3), {}, 1, [(8, 12)], 0),
        ((8, 4, 3, 3), {}, 1, [(8, 36)], 0),
        ((1152, 3, 2, 16, 16), {}, 1, [(1152, 1536)], 0),
        ((6, 8, 5), {"matrices": 6}, 6, [(8, 5)], 0),
        ((48, 5), {"matrices": 6}, 6, [(8, 5)], 0),
        ((1, 8, 5), {"matrices": 1}, 1, [(8, 5)], 0),
        ((30, 5), {"blocks": (12, 6, 6)}, 1, [(12, 5), (6, 5), (6, 5)], 6),
        ((30, 5), {"blocks": (12, 12), "split_blocks": False}, 1, [(24, 5)], 6),
        ((2, 30, 5), {"matrices": 2, "blocks": (15, 15)}, 2, [(15, 5), (15, 5)], 0),
        ((48, 5), {"qkv": (12, 6, 6)}, 1, [(24, 5), (12, 5), (12, 5)], 0),
        ((48, 5), {"qkv": (8, 8, 4, 4)}, 1, [(16, 5), (16, 5), (8, 5), (8, 5)], 0),
        ((60, 5), {"qkv": (12, 6, 6), "logical_rows": 48}, 1, [(24, 5), (12, 5), (12, 5)], 12),
        ((30, 5), {"logical_rows": 24}, 1, [(24, 5)], 6),
    ],
)
def test_what_a_parameter_is(
    shape: tuple[int, ...], tags: dict[str, Any], count: int, shapes: Any, unused: int
) -> None:
    view = view_of(shape, **tags)
    assert (view.count, list(view.shapes), view.unused_rows) == (count, shapes, unused)
    runs = view.local_runs(1, 0)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == math.prod(shape)
    covered = sum(run.stop - run.start for run in runs if run.shape is None)
    assert covered == count * unused * view.cols


@pytest.mark.parametrize(
    ("shape", "tags", "text"),
    [
        ((24, 5), {"blocks": (20, 10)}, "sum to 30"),
        ((24, 5), {"blocks": (12, 6), "logical_rows": 20}, "its logical_rows, of 20 rows"),
        ((24, 5), {"qkv": (6, 3, 3), "blocks": (12, 12)}, "both divide"),
        ((24, 5), {"qkv": (7, 3, 3)}, "13 rows a query group"),
        ((24, 5), {"qkv": (24,)}, "positive row counts of one query group"),
        ((24, 5), {"qkv": (12, 0, 12)}, "positive row counts of one query group"),
        ((24, 5), {"split_blocks": False}, "says nothing without blocks"),
        ((24, 5), {"matrices": 7}, "matrices = 7"),
        ((24, 5), {"matrices": 0}, "matrices = 0"),
        ((24, 5), {"matrices": 2, "logical_rows": 20}, "logical_rows = 20 of 2 matrices"),
        ((4, 6, 5), {"matrices": 2}, "matrices = 2"),
        ((4, 6, 5), {"expert": True}, "matrices=4"),
        ((2, 12, 5), {"matrices": 2, "blocks": (12, 12)}, "sum to 24"),
    ],
)
def test_what_does_not_add_up_is_refused_by_name(
    shape: tuple[int, ...], tags: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        build({"odd_weight": shape}, MUON, tags={"odd_weight": tags}, groups=SINGLE)


def test_a_refused_matrix_may_go_to_adam() -> None:
    tags = {"odd_weight": {"matrices": 2, "logical_rows": 20, "use_muon": False}}
    shapes = {"odd_weight": (24, 5), "b_weight": (8, 8)}
    _, optimizer = build(shapes, MUON, tags=tags, groups=SINGLE)
    assert "use_muon=False" in optimizer.routing_report()


@pytest.mark.parametrize("shape", [(24, 6, 4), (24, 3, 4, 2), (24, 3, 2, 2, 2)])
@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_a_convolution_is_stepped_as_its_flattened_matrix(
    shape: tuple[int, ...], mode: str, precision: str
) -> None:
    """Class bitwise."""
    flat = {"a_weight": (24, 24)}
    settings = {"muon_scale_mode": mode, "muon_fp32_matmul_prec": precision}
    as_conv, as_matrix = trained({"a_weight": shape}, **settings), trained(flat, **settings)
    assert torch.equal(as_conv["a_weight"].view(24, 24), as_matrix["a_weight"])


def test_the_scale_of_a_patch_embedding_is_that_of_its_matrix() -> None:
    shapes = {"patch_weight": (1152, 3, 2, 16, 16)}
    ddp, optimizer = build(shapes, {**MUON, "muon_extra_scale_factor": 0.2}, groups=SINGLE)
    del ddp
    ratio = 0.2 * math.sqrt(1536)
    assert optimizer.state["patch_weight"]["lr_ratio"] == pytest.approx(ratio, rel=1e-12)
    assert "1152x1536  7.838" in optimizer.routing_report()


def test_a_depthwise_convolution_goes_to_adam_unless_told_otherwise() -> None:
    shapes = {"a_conv": (8, 1, 3, 3), "b_weight": (8, 8)}
    _, optimizer = build(shapes, MUON, groups=SINGLE)
    [line] = [text for text in optimizer.routing_report().splitlines() if "a_conv" in text]
    assert "adam" in line and line.endswith("depthwise convolution")
    _, optimizer = build(shapes, MUON, tags={"a_conv": {"use_muon": True}}, groups=SINGLE)
    [line] = [text for text in optimizer.routing_report().splitlines() if "a_conv" in text]
    assert "muon" in line and "8x9" in line


@pytest.mark.parametrize(
    ("layer", "matrix"),
    [
        (nn.Conv3d(1, 64, 2, bias=False), "64x8"),
        (nn.Conv2d(1, 8, (3, 4), bias=False), "8x12"),
        (nn.Conv1d(1, 6, 4, groups=1, bias=False), "6x4"),
        (nn.Conv2d(8, 6, 3, groups=2, bias=False), "6x36"),
        (nn.ConvTranspose1d(8, 4, 3, groups=4, bias=False), "8x3"),
        (nn.Conv1d(6, 6, 4, groups=6, bias=False), None),
        (nn.Conv2d(4, 8, 3, groups=4, bias=False), None),
        (nn.ConvTranspose1d(6, 6, 4, groups=6, bias=False), None),
    ],
    ids=str,
)
def test_a_convolution_of_one_channel_is_no_depthwise_one(
    layer: nn.Module, matrix: str | None
) -> None:
    """Class exact sums: `groups` of the module decides; the step is that of its matrix."""
    model = nn.ModuleDict({"conv": layer, "dense": nn.Linear(4, 4, bias=False)})
    model.forward = lambda grad: (layer.weight * grad).sum() + model["dense"].weight.sum()
    ddp = megatron_lw.DistributedDataParallel(model, SINGLE)
    config = megatron_lw.OptimizerConfig(**MUON, weight_decay=0.01)
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=SINGLE)
    [line] = [text for text in optimizer.routing_report().splitlines() if "conv.weight" in text]
    if matrix is None:
        assert "adam" in line and line.endswith("depthwise convolution")
        return
    assert "muon" in line and matrix in line and line.endswith("matrix")
    start, grad = layer.weight.detach().clone(), torch.randn(layer.weight.shape)
    rows, cols = map(int, matrix.split("x"))
    plain = Reference(
        {"w": start}, {"w": Settings(lr=0.05, weight_decay=0.01, matrix=(rows, cols))}
    )
    plain.step({"w": grad})
    optimizer.zero_grad()
    ddp(grad).backward()
    optimizer.step()
    assert relative(layer.weight.detach() - start, plain.masters["w"] - start) < 1e-5


@pytest.mark.parametrize("dims", [1, 6])
def test_muon_is_not_forced_on_what_is_no_matrix(dims: int) -> None:
    shapes = {"a_weight": (2,) * dims, "b_weight": (8, 8)}
    overrides = {megatron_lw.ParamKey(name="a_weight"): {"optimizer": "muon"}}
    with pytest.raises(ConfigError, match=r"'a_weight' of shape .* is no matrix"):
        build(shapes, MUON, groups=SINGLE, config_overrides=overrides)


def test_a_model_that_gives_muon_no_matrix_is_refused() -> None:
    for shapes, tags in (
        ({"a_bias": (8,)}, {}),
        ({"a_weight": (8, 8)}, {"a_weight": {"use_muon": False}}),
        ({"a_conv": (8, 1, 3)}, {}),
    ):
        with pytest.raises(ConfigError, match="no matrix of the model is routed"):
            build(shapes, MUON, tags=tags, groups=SINGLE)


def test_blocks_are_stepped_as_parameters_of_their_own() -> None:
    """Class bitwise."""
    parts = {"a_weight": (24, 40), "b_weight": (40, 40), "c_weight": (24, 40)}
    values, fused = initial_values(parts), {"w_weight": (88, 40)}

    def joined(shapes: Any, rank: int, step: int) -> dict[str, torch.Tensor]:
        return {"w_weight": torch.cat(list(integer_grads(parts, rank, step).values()))}

    ddp, optimizer = build(fused, MUON, tags={"w_weight": {"blocks": (24, 40, 24)}}, groups=SINGLE)
    with torch.no_grad():
        ddp.module.w_weight.copy_(torch.cat(list(values.values())))
    optimizer.reload_model_params()
    for step in range(2):
        optimizer.zero_grad()
        ddp(joined(fused, 0, step)).backward()
        optimizer.step()
    apart = trained(parts)
    assert torch.equal(ddp.module.w_weight, torch.cat(list(apart.values())))
    ratios = optimizer.state["w_weight"]["lr_ratio"]
    assert ratios == tuple(math.sqrt(side) for side in (40, 40, 40))


@pytest.mark.parametrize(
    ("shape", "tag"),
    [((3, 8, 20), {"matrices": 3}), ((24, 20), {"matrices": 3}), ((24, 20), {"blocks": (8, 8, 8)})],
)
def test_each_matrix_has_a_norm_of_its_own(shape: tuple[int, ...], tag: dict[str, Any]) -> None:
    """Class bitwise: gradients of some that are 2^10 times larger or smaller change nothing."""
    results = []
    for factors in ((1.0, 1.0, 1.0), (2.0**-10, 1.0, 2.0**10)):
        scale = torch.tensor(factors)[:, None, None].expand(3, 8, 20).reshape(shape)

        def grads(shapes: Any, rank: int, step: int, scale: Any = scale) -> Any:
            return {"a_weight": integer_grads(shapes, rank, step)["a_weight"] * scale}

        results.append(trained({"a_weight": shape}, {"a_weight": tag}, grads)["a_weight"])
    assert torch.equal(*results)
    assert not torch.isclose(results[0], initial_values({"a_weight": shape})["a_weight"]).all()


def test_rows_beyond_the_blocks_decay_and_nothing_else() -> None:
    """Class bitwise: their gradient moves them by exactly nothing."""
    shapes = {"a_weight": (30, 40)}
    tags = {"a_weight": {"blocks": (12, 12)}}
    start = initial_values(shapes)["a_weight"]
    ours = trained(shapes, tags, weight_decay=0.0)["a_weight"]
    assert torch.equal(ours[24:], start[24:])
    assert not torch.isclose(ours[:24], start[:24]).all(dim=1).any()
    decayed = trained(shapes, tags, weight_decay=0.5)["a_weight"]
    torch.testing.assert_close(decayed[24:], start[24:] * (1 - 0.05 * 0.5) ** 2)


@pytest.mark.parametrize(
    ("tags", "parts"),
    [
        ({"qkv": (8, 4, 4)}, [(0, 8), (8, 12), (12, 16)]),
        ({"qkv": (4, 4, 4, 4)}, [(0, 4), (4, 8), (8, 12), (12, 16)]),
    ],
)
def test_fused_attention_is_stepped_projection_by_projection(tags: Any, parts: Any) -> None:
    """Class exact sums: three query groups of sixteen rows, against the reference."""
    shapes = {"qkv_weight": (48, 40)}
    rows = tuple(tuple(r for r in range(48) if low <= r % 16 < high) for low, high in parts)
    settings = Settings(lr=0.05, weight_decay=0.01, matrix=(48, 40), parts=rows)
    expected = reference(shapes, {"qkv_weight": settings})
    ours = trained(shapes, {"qkv_weight": tags})
    assert relative(ours["qkv_weight"], expected["qkv_weight"]) < 1e-5
    fused = trained(shapes, {"qkv_weight": tags}, muon_split_qkv=False)
    assert torch.equal(fused["qkv_weight"], trained(shapes)["qkv_weight"])
    assert relative(fused["qkv_weight"], expected["qkv_weight"]) > 1e-3


def test_padding_enters_neither_scale_nor_norm() -> None:
    """Class bitwise: garbage in the padding rows of the gradient changes no logical element."""
    padded, plain = {"a_weight": (32, 24)}, {"a_weight": (24, 24)}

    def garbage(shapes: Any, rank: int, step: int) -> dict[str, torch.Tensor]:
        grad = integer_grads(plain, rank, step)["a_weight"]
        return {"a_weight": torch.cat([grad, torch.full((8, 24), 1e3)])}

    ddp, optimizer = build(padded, MUON, tags={"a_weight": {"logical_rows": 24}}, groups=SINGLE)
    with torch.no_grad():
        ddp.module.a_weight[:24] = initial_values(plain)["a_weight"]
    optimizer.reload_model_params()
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        ddp(garbage(padded, 0, step)).backward()
        norms.append(optimizer.step()[1])
    assert torch.equal(ddp.module.a_weight[:24], trained(plain)["a_weight"])
    assert norms[1] == pytest.approx(float(integer_grads(plain, 0, 1)["a_weight"].norm()))
    assert optimizer.state["a_weight"]["lr_ratio"] == math.sqrt(24)


def test_a_saved_ratio_steers_nothing_and_changed_settings_act_at_once() -> None:
    """Class bitwise."""
    shapes, results = {"a_weight": (24, 48)}, []
    for stale in (False, True):
        ddp, optimizer = build(shapes, MUON, groups=SINGLE)
        assert optimizer.state["a_weight"]["lr_ratio"] == math.sqrt(48), "before any step"
        for step in range(2):
            if stale:
                optimizer.state["a_weight"]["lr_ratio"] = 1e6
                [child] = optimizer.runtime.children
                child.load_owned_values({"a_weight": {"lr_ratio": 1e6}})
            if step == 1:
                optimizer.param_groups[0].update(scale_mode="shape_scaling", extra_scale_factor=3.0)
            optimizer.zero_grad()
            ddp(integer_grads(shapes, 0, step)).backward()
            optimizer.step()
        assert optimizer.state["a_weight"]["lr_ratio"] == 3.0
        [child] = optimizer.runtime.children
        assert child.owned_values() == {"a_weight": {"lr_ratio": 3.0}}
        results.append(ddp.module.a_weight.detach().clone())
    assert torch.equal(*results)


def test_megatrons_attributes_declare_fused_attention() -> None:
    layer = nn.Linear(8, 48, bias=False)
    layer.weight.is_qkv, layer.weight.qkv_split_shapes = True, [12, 6, 6]
    [info] = describe([layer], SINGLE).infos
    assert matrix_view(info).shapes == ((24, 8), (12, 8), (12, 8))
    del layer.weight.qkv_split_shapes
    with pytest.raises(ConfigError, match=r"'weight': is_qkv is set but qkv_split_shapes = None"):
        describe([layer], SINGLE)
    layer.weight.qkv_split_shapes = [13, 6, 6]
    with pytest.raises(ConfigError, match=r"'weight': qkv .* 25 rows"):
        describe([layer], SINGLE)


def test_megatrons_stride_declares_gate_and_up() -> None:
    layer = nn.Linear(8, 24, bias=False)
    weight: Any = layer.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 2
    [info] = describe([layer], SINGLE).infos
    assert (info.blocks, info.split_blocks) == ((12, 12), False)
    assert matrix_view(info).shapes == ((24, 8),)
    weight.partition_stride = 5
    with pytest.raises(ConfigError, match=r"'weight' .*partition_stride = 5 along dimension 0"):
        describe([layer], SINGLE)
    weight.partition_dim, weight.partition_stride = 1, 2
    with pytest.raises(ConfigError, match=r"partition_stride = 2 along dimension 1"):
        describe([layer], SINGLE)


def test_the_report_lists_child_group_matrices_scale_and_owner() -> None:
    shapes = {
        "a_bias": (8,), "b_weight": (30, 8), "c_weight": (2, 4, 9), "d_weight": (32, 8)
    }  # fmt: skip
    tags = {
        "b_weight": {"blocks": (12, 12)},
        "c_weight": {"matrices": 2},
        "d_weight": {"qkv": (8, 4, 4)},
    }
    _, optimizer = build(shapes, MUON, tags=tags, groups=SINGLE)
    lines = {line.split()[0]: line for line in optimizer.routing_report().splitlines()}
    assert "muon   2 x 12x8 + 6 rows without update  2 x 3.464      0" in lines["b_weight"]
    assert "2 of 4x9" in lines["c_weight"]
    assert "16x8 + 2 x 8x8" in lines["d_weight"]
    assert "4 + 2 x 2.828" in lines["d_weight"]
    assert " adam " in lines["a_bias"] and "no matrix" in lines["a_bias"]
    assert "muon/dense" in lines["d_weight"]
