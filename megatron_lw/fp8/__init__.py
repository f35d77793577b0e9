"""FP8 weights: formats, arithmetic, tensors, layers, and the adapter of Transformer Engine."""

from __future__ import annotations

from megatron_lw.fp8.linear import Linear, quantize_model
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import dequantise, quantise_bucket
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.tensor import QuantisedTensor

__all__ = [
    "Linear",
    "Planes",
    "QuantisedTensor",
    "Recipe",
    "dequantise",
    "quantise_bucket",
    "quantize_model",
]
