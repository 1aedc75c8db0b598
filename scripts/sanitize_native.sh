#!/usr/bin/env bash
# Runs the native kernels' tests with address and undefined-behaviour sanitizers, on a copy of src, for every
# instruction set of this processor. PYTHON names the interpreter (default: .venv's). Options go on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r src "$copy/src"
rm -f "$copy"/src/attemper/kernels/native/*.so
"$python" scripts/build_native.py --sanitize --into "$copy/src/attemper/kernels/native"
export PYTHONPATH=$copy/src PYTHONDONTWRITEBYTECODE=1
# Python itself leaks by design, and torch's own libraries were not built for this.
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so) $(g++ -print-file-name=libstdc++.so.6)"
for capability in ${CAPABILITIES:-avx512 avx2 default}; do
    printf '\n== %s\n' "$capability"
    ATEN_CPU_CAPABILITY=$capability LD_PRELOAD=$preload "$python" -m pytest tests/kernels/test_native.py -q -x \
        -p no:cacheprovider -p no:faulthandler "$@"
done
