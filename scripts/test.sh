#!/usr/bin/env bash
# Installs attemper with its development tools into .venv and runs every check: lint, format, types, all tests.
# Needs Python 3.11 or newer with venv and pip; PYTHON names another interpreter than python3. Options go on to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

create_environment
# pyright runs on node: the one on PATH, or else one that pip brings.
if command -v node >/dev/null; then
    install_attemper dev
else
    install_attemper dev "pyright[nodejs]"
fi

build_native
install_vision
install_keras
install_chromium

say "ruff check"
.venv/bin/python -m ruff check .

say "ruff format --check"
.venv/bin/python -m ruff format --check .

say "pyright"
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 # no look-up of a newer pyright
.venv/bin/python -m pyright --version ||
    fail "TYPES WERE NOT CHECKED: pyright did not start. It needs node: put node on PATH, or .venv/bin/pip install 'pyright[nodejs]'."
.venv/bin/python -m pyright --pythonpath .venv/bin/python

say "pytest --all"
.venv/bin/python -m pytest --all -n 2 --dist worksteal "$@" # one thread each: tests/conftest.py

say "All checks passed."
