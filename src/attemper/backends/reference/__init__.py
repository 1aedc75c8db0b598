"""The dense backend, float64 inside: the specification of the others."""
