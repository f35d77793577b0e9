"""Storage and communication."""
