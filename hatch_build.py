"""What an install adds to the Python files: the native kernels, where there is a C++ compiler.

A wheel with them is ``py3-none-<platform>``: one for every Python, because ctypes loads them. Where they cannot be
built, the wheel is ``py3-none-any``, the install succeeds, and the reason travels in a file that ``attemper doctor``
shows.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "attemper/backends/native"


class CustomBuildHook(BuildHookInterface):
    """Compiles, and tells hatchling which files and which tag the wheel gets."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Editable: into src, and only what changed. Standard: into an empty folder, so that nothing old gets in."""
        build = _build(Path(self.root))
        if version == "editable":
            reason = build.install()
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="attemper-native-")
            into = Path(self._folder.name)
            reason = build.install(into)
            for path in into.iterdir():
                build_data["force_include"][str(path)] = f"{NATIVE}/{path.name}"
            if reason is None:
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{_platform()}"
        if reason is not None:
            self.app.display_warning(f"attemper: the native kernels are not built: {reason}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The libraries are in the wheel: their folder can go."""
        if version != "editable":
            self._folder.cleanup()


def _build(root: Path) -> ModuleType:
    """The package's build.py, by its path: importing the package needs torch."""
    path = root / "src" / NATIVE / "build.py"
    spec = importlib.util.spec_from_file_location("attemper_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform() -> str:
    """linux_x86_64 (auditwheel makes it manylinux), macosx_11_0_arm64, ..."""
    if sys.platform == "darwin":
        from packaging.tags import platform_tags

        return next(iter(platform_tags()))
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
