"""Quantised weights and Transformer Engine."""
