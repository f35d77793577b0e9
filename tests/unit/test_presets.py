"""Shapes of the presets, against the parameter counts that are published for the models."""

from __future__ import annotations

import math

import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.presets import PRESETS, ModelParam, model_params, preset

TOTALS = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
}


def shapes(name: str, *, fused: bool, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"decoder.layers.{layer}."
    return {
        param.name.removeprefix(prefix): param.shape
        for param in model_params(preset(name), fused=fused)
        if param.name.startswith(prefix)
    }


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name: str, fused: bool) -> None:
    params = model_params(preset(name), fused=fused)
    assert sum(math.prod(param.shape) for param in params) == TOTALS[name]
    assert len({param.name for param in params}) == len(params)


def test_fused_and_unfused_shapes_of_llama() -> None:
    fused = shapes("llama3-8b", fused=True, layer=31)
    assert fused["self_attention.linear_qkv.weight"] == (6144, 4096)
    assert fused["mlp.linear_fc1.weight"] == (28672, 4096)
    assert fused["mlp.linear_fc2.weight"] == (4096, 14336)
    unfused = shapes("llama3-8b", fused=False, layer=0)
    assert unfused["self_attention.linear_k.weight"] == (1024, 4096)
    assert unfused["mlp.linear_fc1_up.weight"] == (14336, 4096)


def test_experts_and_latent_attention_of_deepseek() -> None:
    dense, sparse = (shapes("deepseek-v3", fused=True, layer=layer) for layer in (2, 3))
    assert dense["mlp.linear_fc1.weight"] == (2 * 18432, 7168)
    assert "mlp.router.weight" not in dense
    assert sparse["mlp.router.weight"] == (256, 7168)
    assert sparse["mlp.experts.linear_fc1.weight255"] == (4096, 7168)
    assert sparse["mlp.shared_experts.linear_fc2.weight"] == (7168, 2048)
    assert sparse["self_attention.linear_kv_down_proj.weight"] == (576, 7168)
    assert sparse["self_attention.linear_q_up_proj.weight"] == (24576, 1536)
    assert sparse["self_attention.linear_proj.weight"] == (7168, 16384)


def test_what_tensor_parallelism_cuts() -> None:
    cut = {param.name: param.sharded for param in model_params(preset("deepseek-v3"))}
    prefix = "decoder.layers.3."
    assert not cut[f"{prefix}mlp.router.weight"]
    assert not cut[f"{prefix}self_attention.linear_q_down_proj.weight"]
    assert cut[f"{prefix}self_attention.linear_q_up_proj.weight"]
    bias = {param.name: param.sharded for param in model_params(preset("gpt2-124m"))}
    assert bias["decoder.layers.0.mlp.linear_fc1.bias"]
    assert not bias["decoder.layers.0.mlp.linear_fc2.bias"]


def test_the_vocabulary_is_padded_only_where_it_must_be() -> None:
    def words(tp: int) -> ModelParam:
        return model_params(preset("gpt2-124m"), tp=tp)[0]

    assert words(1).shape == (50257, 768)
    assert words(2).shape == (50432, 768)
    assert words(2).tied == words(2).name


def test_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt5': choose one of gpt2-124m"):
        preset("gpt5")
