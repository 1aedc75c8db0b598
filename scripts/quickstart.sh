#!/usr/bin/env bash
# Installs attemper into .venv and runs `attemper scan`: every head of the small model that ships, over a text that ships.
# Options go on to the scan: bash scripts/quickstart.sh --html page.html
# Needs Python 3.11 or newer with venv and pip; PYTHON names another interpreter than python3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# What is printed before the scan goes to stderr, so that --json leaves one document on stdout.
create_environment >&2
install_attemper "" >&2
build_native >&2
cd "$caller" # where relative paths among the options mean what they say
"$root/.venv/bin/attemper" scan "$@"
