"""Whether an installed attemper has its native kernels and they compute: one call, held against the reference."""

from __future__ import annotations

import torch

import attemper
from attemper.backends.native.library import library


def main() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, rows, 64) for rows in (96, 300, 300))
    got = attemper.attention(query, key, value, stats="entropy", backend="native")
    want = attemper.attention(query, key, value, stats="entropy", backend="reference")
    assert got.stats is not None
    assert want.stats is not None
    torch.testing.assert_close(got.output, want.output)
    torch.testing.assert_close(got.stats.entropy, want.stats.entropy)
    print(f"attemper {attemper.__version__} in {attemper.__file__}: {library()._name} computes")


if __name__ == "__main__":
    main()
