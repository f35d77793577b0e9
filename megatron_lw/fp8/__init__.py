"""FP8 weights: formats, arithmetic, and the adapter of Transformer Engine."""
