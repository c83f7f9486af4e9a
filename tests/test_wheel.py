"""The wheel holds one package, foresay, with the five in it and the bundled pair; never tests or bench. That it serves
once it is installed shows tests/test_readme_runs.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("drafters", "kvpaging", "server", "spec", "verifier")
#: What building needs; copied, so that no build folder or egg-info lands in the checkout.
SOURCES = (*PACKAGES, "tests", "bench", "docs", "foresay", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as it is, offline: the build backend comes with torch, which needs setuptools."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, checkout / name)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run(
        [sys.executable, *build, str(out), str(checkout)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("foresay-*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {f"foresay/{path.relative_to(ROOT)}" for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources | {"foresay/__init__.py"}
    assert {Path(name).parts[0] for name in files} == {"foresay"}, "no other name of ours is to lie in site-packages"


def test_the_wheel_holds_the_bundled_models_whole(wheel: zipfile.ZipFile) -> None:
    bundled = ROOT / "server" / "bundled"
    here = {f"foresay/{path.relative_to(ROOT)}": path.stat().st_size for path in bundled.rglob("*") if path.is_file()}
    packed = {entry.filename: entry.file_size for entry in wheel.infolist() if "server/bundled/" in entry.filename}
    assert packed == here
    assert any(name.endswith(".safetensors") for name in packed)


def test_the_wheel_is_typed_and_licensed(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "foresay/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert (
        "foresay = foresay.server.cli.main:main"
        in wheel.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    )
