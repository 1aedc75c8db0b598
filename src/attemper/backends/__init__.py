"""Kernels: the only code that does the arithmetic of attention. They know nothing of the rest of the package."""
