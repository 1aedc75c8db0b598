# Sourced by test.sh: the default tests with other releases than those of constraints.txt.

# What these packages warn of in their newest releases is theirs to say, and does not end a test; ours does, as everywhere.
lane_warnings() {
    printf '%s\n' error
    printf 'default::%s\n' DeprecationWarning PendingDeprecationWarning FutureWarning
    printf 'default:::%s(\\..*)?\n' torch transformers huggingface_hub accelerate lightning pytorch_lightning keras numpy pandas matplotlib typer click
}

# test_releases newest|oldest --torch|"" [PYTEST OPTION...]
test_releases() {
    local lane=$1 torch=$2 failed=
    shift 2
    environment=build/releases-$lane
    constraints=build/releases-$lane.txt
    create_environment
    mkdir -p build
    "$environment/bin/python" scripts/releases.py versions "$lane" $torch >"$constraints"
    say "The $lane releases:"
    cat "$constraints"
    install_attemper dev keras pyarrow # fsspec comes with torch
    build_native
    export KERAS_BACKEND=torch # the only backend that is here
    say "pytest with the $lane releases"
    local junit=build/releases-$lane.xml
    "$environment/bin/python" -m pytest -n 2 --dist worksteal -o "filterwarnings=$(lane_warnings)" --junitxml="$junit" "$@" || failed=yes
    [[ $# -gt 0 ]] || "$environment/bin/python" scripts/releases.py record "$lane" "$junit"
    [[ ! $failed ]] || fail "FAILED: tests with the $lane releases"
    say "All tests passed with the $lane releases."
}
