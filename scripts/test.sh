#!/usr/bin/env bash
# Installs attemper with its development tools into .venv and runs the checks: lint, format, types and the tests.
# --all runs what a default run holds back, too, and installs what only that needs. Other options go on to pytest.
# --long runs what --all leaves out because it takes minutes, and nothing else: over two hours, before other kernels or sites are released.
# --releases newest (or oldest) runs the default tests with the newest (the oldest claimed) releases of what attemper stands on,
# in build/releases-newest, and writes the lane's row in docs/compatibility.md. --with-torch takes torch's ordinary build, of 5 GB.
# Needs Python 3.11 or newer with venv and pip; PYTHON names another interpreter than python3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

all= long= releases= torch=
given=()
while (($#)); do
    case $1 in
    --releases) releases=${2:-} && shift ;;
    --with-torch) torch=--torch ;;
    --all) all=yes && given+=("$1") ;;
    --long) long=yes && given+=("$1") ;;
    *) given+=("$1") ;;
    esac
    shift
done
set -- "${given[@]}"
[[ ! $releases || $releases == newest || $releases == oldest ]] ||
    fail "--releases takes newest or oldest, got '$releases'. For example: bash $0 --releases newest"
[[ ! $torch || $releases ]] || fail "--with-torch goes with --releases: bash $0 --releases newest --with-torch"

if [[ $releases ]]; then
    source scripts/releases.sh
    test_releases "$releases" "$torch" "$@"
    exit
fi

create_environment
install_chromium &
browser=$!
# pyright runs on node: the one on PATH, or else one that pip brings.
if command -v node >/dev/null; then
    install_attemper dev
else
    install_attemper dev "pyright[nodejs]"
fi
build_native
wait "$browser"
if [[ $all ]]; then
    install_vision
    install_trl
    install_parquet
    install_docs
    install_axe
fi
if [[ $long ]]; then
    install_keras
    install_ray
    install_notebooks
fi
if [[ $long && ! $all ]]; then
    say "pytest --long"
    .venv/bin/python -m pytest -n 2 --dist worksteal "$@" || fail "FAILED: tests"
    exit
fi

# Beside the tests, at a lower rank: while they wait (a browser, processes that they stop) it has the core that would be idle.
# Room for what lives briefly: node collects it less often, and checking takes an eighth less time.
check_types() {
    export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 # no look-up of a newer pyright
    .venv/bin/python -m pyright --version ||
        fail "TYPES WERE NOT CHECKED: pyright did not start. It needs node: put node on PATH, or .venv/bin/pip install 'pyright[nodejs]'."
    local room=--max-semi-space-size=128
    NODE_OPTIONS=$room node --version >/dev/null 2>&1 || room= # an older node refuses it
    NODE_OPTIONS="${NODE_OPTIONS:-} $room" nice -n 5 .venv/bin/python -m pyright --pythonpath .venv/bin/python
}

say "ruff check"
.venv/bin/python -m ruff check .

say "ruff format --check"
.venv/bin/python -m ruff format --check .

types=$(mktemp)
trap 'rm -f "$types"' EXIT
check_types >"$types" 2>&1 &
pyright=$!

say "pytest ${all:+--all }(pyright runs beside it)"
failed=
# One thread each: tests/support/fixtures.py. What only --all runs waits for other processes a fifth of its time: a third has it.
workers=2
[[ ! $all ]] || workers=3
.venv/bin/python -m pytest -n "$workers" --dist worksteal "$@" || failed=tests

if [[ $all ]]; then
    say "pytest --all, with pyarrow: the files that have tests of it"
    mapfile -t files < <(grep -rlE 'importorskip\("pyarrow|pyarrow is not installed' tests --include='test_*.py')
    PYTHONPATH=$root/build/parquet${PYTHONPATH:+:$PYTHONPATH} \
        .venv/bin/python -m pytest -n "$workers" --dist worksteal --all "${files[@]}" || failed=tests
fi

say "pyright"
wait "$pyright" || failed="${failed:+$failed and }types"
cat "$types"

[[ ! $failed ]] || fail "FAILED: $failed"
say "All checks passed."
