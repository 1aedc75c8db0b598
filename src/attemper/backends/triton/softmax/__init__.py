"""Kernels of softmax attention: keys are merged block by block."""
