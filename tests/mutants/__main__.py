"""Break a kernel, one thing at a time: ``python -m tests.mutants TABLE``, from the root of the repository.

TABLE is "blocked" (default), "triton", "native" or "native-rows". Prints killed or SURVIVED for each mutant.
Exits 1 if one survives, does not compile, or if its text is no longer found exactly once: then the kernel changed,
and the table has to follow.
"""

from __future__ import annotations

import argparse

from tests.mutants import blocked, native, native_rows, triton
from tests.mutants.runner import run_table

TABLES = {
    "blocked": blocked.MUTANTS,
    "triton": triton.MUTANTS,
    "native": native.MUTANTS,
    "native-rows": native_rows.MUTANTS,
}


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", nargs="?", default="blocked", choices=TABLES)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose name contains WORD")
    options = parser.parse_args()
    return run_table([mutant for mutant in TABLES[options.table] if options.only in mutant.name], options.jobs)


if __name__ == "__main__":
    raise SystemExit(main())
