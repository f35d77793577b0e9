"""The optimizers under the layer-wise one."""
