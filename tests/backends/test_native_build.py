"""What an install does with and without a C++ compiler; and no run of the tests loses the native kernels unseen."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

from attemper.backends import table
from attemper.backends.native import build

ROOT = Path(__file__).parents[2]


def test_where_a_compiler_is_the_native_kernels_are_built_from_these_sources():
    try:
        build.compiler()
    except build.CannotBuildError as error:
        pytest.skip(str(error))
    assert build.library_files(), (
        "a C++ compiler is here and the native kernels are not built: python scripts/build_native.py"
    )
    assert build.stale() == [], "built from other sources: python scripts/build_native.py"


@pytest.mark.parametrize("script", ["hatch_build.py", "scripts/build_native.py"])
def test_what_a_script_takes_of_the_build_is_there(script: str):
    names = set(re.findall(r"\bbuild\.(?!py\b)(\w+)", (ROOT / script).read_text("utf-8")))
    assert names
    assert names <= set(dir(build))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sources that compile in no time."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "small.h").write_text("#pragma once\ninline int number() { return 1; }\n")
    text = '#include "small.h"\nextern "C" const char* stamp() { return number() ? ATTEMPER_STAMP : nullptr; }\n'
    (folder / "small.cpp").write_text(text)
    return folder


@pytest.fixture
def compiled(source: Path, tmp_path: Path) -> Path:
    try:
        build.compiler()
    except build.CannotBuildError as error:
        pytest.skip(str(error))
    assert build.install(tmp_path / "into", source=source) is None
    return tmp_path / "into"


def times(folder: Path) -> list[int]:
    return [path.stat().st_mtime_ns for path in build.library_files(folder)]


@pytest.mark.slow("compiles")
def test_nothing_is_compiled_again_until_sources_or_options_change(
    compiled: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    before = times(compiled)
    assert before
    assert build.stale(compiled, source=source) == []
    build.libraries(compiled, source=source)
    assert times(compiled) == before
    with (source / "small.h").open("a") as file:
        file.write("// changed\n")
    assert len(build.stale(compiled, source=source)) == len(before)
    build.libraries(compiled, source=source)
    changed = times(compiled)
    assert all(new != old for new, old in zip(changed, before, strict=True))
    assert build.stale(compiled, source=source) == []
    monkeypatch.setenv("CXXFLAGS", "-DUNUSED")
    build.libraries(compiled, source=source)
    assert all(new != old for new, old in zip(times(compiled), changed, strict=True))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/bin/false", "/bin/false could not compile the .* library: it gave no reason"),
        ("/nowhere/c++", "the C\\+\\+ compiler could not be started"),
        ("", "no C\\+\\+ compiler was found when attemper was installed \\(Debian: apt-get install g\\+\\+\\)"),
    ],
)
def test_an_install_that_cannot_compile_leaves_the_reason_and_no_old_library(
    compiled: Path, source: Path, compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as changed:
        changed.setenv("CXX", compiler)
        if not compiler:
            changed.setenv("PATH", "/nowhere")
        told = build.install(compiled, source=source)
    assert build.library_files(compiled) == []
    folder = compiled.parent / "backends" / "native"
    folder.mkdir(parents=True)
    (compiled / build.UNBUILT).rename(folder / build.UNBUILT)
    monkeypatch.setattr(table, "__file__", str(compiled.parent / "backends/table.py"))
    assert table._native_missing() == f"not built: {told}"
    with pytest.raises(build.CannotBuildError, match=reason):
        raise build.CannotBuildError(told)


def test_an_error_of_the_compiler_is_told_and_a_repaired_build_takes_the_reason_away(
    compiled: Path, source: Path, capfd: pytest.CaptureFixture[str]
):
    good = (source / "small.h").read_text()
    (source / "small.h").write_text("#error no such thing\n")
    assert "no such thing" in str(build.install(compiled, source=source))
    assert "no such thing" in (compiled / build.UNBUILT).read_text()
    (source / "small.h").write_text(good)
    assert build.install(compiled, source=source) is None
    assert not (compiled / build.UNBUILT).exists()
    assert build.library_files(compiled)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """hatch_build.py without hatchling, which an install brings for itself."""
    name = "hatchling.builders.hooks.plugin.interface"
    for number in range(1, 6):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:number]), types.ModuleType(name))
    sys.modules[name].BuildHookInterface = type("BuildHookInterface", (), {})  # pyright: ignore
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("reason", [None, "no C++ compiler"])
def test_a_wheel_with_libraries_is_for_one_platform_and_every_python(
    reason: str | None, hook: types.ModuleType, monkeypatch: pytest.MonkeyPatch
):
    def install(into: Path) -> str | None:
        (into / ("unbuilt.txt" if reason else "attemper_native_avx2.so")).write_text("")
        return reason

    warnings = []
    monkeypatch.setattr(hook, "_build", lambda root: types.SimpleNamespace(install=install))
    made = hook.CustomBuildHook()
    made.root, made.app = str(ROOT), types.SimpleNamespace(display_warning=warnings.append)
    data = {"force_include": {}, "pure_python": True}
    made.initialize("standard", data)
    (target,) = data["force_include"].values()
    if reason is None:
        assert target == "attemper/backends/native/attemper_native_avx2.so"
        assert data["tag"] == f"py3-none-{hook._platform()}"
        assert data["pure_python"] is False
        assert warnings == []
    else:
        assert target == "attemper/backends/native/unbuilt.txt"
        assert "tag" not in data
        assert data["pure_python"] is True
        assert reason in warnings[0]
    made.finalize("standard", data, "")
