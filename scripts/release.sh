#!/usr/bin/env bash
# Builds what is released, wheel and source distribution, and tries each as a user meets it: installed into an empty environment of
# its own, outside of this tree, with `attemper --help`, every public name, `attemper scan`, its page and `attemper doctor`.
# Leaves dist/ when all of it works. Needs Python 3.11 or newer with venv and pip; PYTHON names another interpreter than python3.
# Uploads nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip="-m pip install --quiet --disable-pip-version-check"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
grep -q "^## \[$version\] - [0-9-]*$" CHANGELOG.md || fail "CHANGELOG.md has no section '## [$version] - DATE': cut it first."

say "Building attemper $version"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" $pip build
rm -rf "$work/dist"
"$work/tools/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -20 "$work/build.log"; fail "The build failed."; }
ls -l "$work/dist"

cat >"$work/names.py" <<'PY'
"""Every public name loads, from the installed package and not from a source tree."""
import sys
from pathlib import Path

import attemper

place = Path(attemper.__file__).resolve()
assert Path(sys.prefix).resolve() in place.parents, f"attemper comes from {place}"
assert attemper.__version__ == sys.argv[1], attemper.__version__
for name in attemper.__all__:
    assert getattr(attemper, name) is not None
print(f"{len(attemper.__all__)} public names load")
PY

# try_it FILE: installs it into an empty environment and does there what a user does first.
try_it() {
    local file=$1 place
    place=$work/try-${1##*.}
    say "Trying $(basename "$file") in an empty environment"
    "$python" -m venv "$place"
    "$place/bin/python" $pip -c "$root/constraints.txt" "$file"
    mkdir "$place/work"
    (
        cd "$place/work"
        unset PYTHONPATH
        "$place/bin/attemper" --version | grep -qx "attemper $version"
        "$place/bin/attemper" --help | grep -q "Measure and temper the sharpness of attention"
        "$place/bin/python" "$work/names.py" "$version"
        "$place/bin/attemper" scan --html page.html 2>&1 | tee scan.txt
        grep -q "no alarms" scan.txt
        [[ -s page.html ]]
        "$place/bin/attemper" doctor | grep -i native
    )
    rm -rf "$place"
}

try_it "$work"/dist/*.whl
try_it "$work"/dist/*.tar.gz

mkdir -p dist
cp "$work"/dist/* dist/
say "attemper $version works from its wheel and from its source distribution: dist/"
