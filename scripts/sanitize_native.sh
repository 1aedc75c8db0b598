#!/usr/bin/env bash
# Runs the native kernels' tests with address and undefined-behaviour sanitizers, on a copy of src, for every
# instruction set of this processor. PYTHON names the interpreter (default: .venv's), SETS the instruction sets (default:
# all), SECONDS_EACH how long the tests of one may take. Options go on to pytest. What a tile instruction (amx) reads and
# writes by itself no sanitizer sees; avx512bf16 has the same addresses in plain loads and stores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r src "$copy/src"
rm -f "$copy"/src/attemper/backends/native/*.so
sets=${SETS:-amx avx512bf16 avx512 avx2 portable}
# shellcheck disable=SC2086 # one word a set
"$python" scripts/build_native.py --sanitize --into "$copy/built" --sets $sets
export PYTHONPATH=$copy/src PYTHONDONTWRITEBYTECODE=1
# Python itself leaks by design, and torch's own libraries were not built for this.
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so) $(g++ -print-file-name=libstdc++.so.6)"
for set in $sets; do
    printf '\n== %s\n' "$set"
    case $set in avx2) capability=avx2 ;; portable) capability=default ;; *) capability=avx512 ;; esac
    rm -f "$copy"/src/attemper/backends/native/*.so
    cp "$copy/built/attemper_native_$set.so" "$copy/src/attemper/backends/native/"
    ATEN_CPU_CAPABILITY=$capability LD_PRELOAD=$preload timeout "${SECONDS_EACH:-3600}" "$python" -m pytest \
        tests/backends/test_native.py tests/backends/test_native_rowwise.py tests/backends/test_native_weights.py tests/backends/test_native_sigmoid.py \
        tests/monitor/test_native_sums.py tests/hostile/test_infinite_keys.py -q -x -p no:cacheprovider -p no:faulthandler "$@"
done
