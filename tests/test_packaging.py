"""The wheel, the Dockerfile, the unit of systemd and what make says are true of the package; its pins agree. That it
serves once it is installed shows tests/test_readme_runs.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from foresay.server.cli.command import USAGE_ERROR
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.fields import all_settings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("drafters", "kvpaging", "server", "spec", "verifier")
PACKAGING = ROOT / "packaging"
DOCKERFILE = (PACKAGING / "Dockerfile").read_text("utf-8")
UNIT = (PACKAGING / "foresay.service").read_text("utf-8")


def instruction(name: str) -> list[str]:
    """What stands behind each instruction of a name, lines joined."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built offline from what the image copies, where there are tests and a bench, too: the build backend comes with
    torch, which needs setuptools."""
    build, ignored = tmp_path_factory.mktemp("build"), (PACKAGING / "Dockerfile.dockerignore").read_text("utf-8")
    for *sources, target in map(str.split, instruction("COPY")):
        for source in sources:
            assert f"!{source}\n" in ignored
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, build / target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / source, build / target)
    for name in ("tests", "bench"):
        (build / name).mkdir()
        (build / name / "__init__.py").touch()
    (install,) = [words for words in instruction("RUN") if "pip install" in words]
    assert "pip install --no-cache-dir -c constraints.txt . " in install
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "-c", "constraints.txt", "-w", "out", "."], cwd=build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (build / "out").glob("foresay-*.whl")
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
        "foresay = foresay.server.cli.__main__:main"
        in wheel.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    )


@pytest.mark.parametrize(("device", "status"), [("cpu", 0), ("cuda", 0), ("tpu", 1)])
def test_the_device_of_the_image_is_one_of_two(tmp_path: Path, device: str, status: int) -> None:
    """The shell of the RUN, with an apt-get that only says that it was called."""
    for name in ("apt-get", "rm"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0 $*"\n')
        (tmp_path / name).chmod(0o755)
    (choice,) = [words for words in instruction("RUN") if "DEVICE" in words]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DEVICE": device}
    done = subprocess.run(["sh", "-c", choice], env=environment, capture_output=True, text=True)
    assert done.returncode == status
    assert ("gcc" in done.stdout) is (device == "cuda")
    assert device != "tpu" or "cpu or cuda, not tpu" in done.stderr


def test_the_image_listens_where_it_says_and_has_a_health_check() -> None:
    assert f"EXPOSE {ServeConfig().port}" in DOCKERFILE
    assert "FORESAY_HOST=0.0.0.0" in DOCKERFILE and f"127.0.0.1:{ServeConfig().port}/health" in DOCKERFILE
    assert instruction("USER") == ["1000"]


def test_the_service_is_not_started_again_for_wrong_settings() -> None:
    assert f"RestartPreventExitStatus={USAGE_ERROR}\n" in UNIT
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(patience) > ServeConfig().drain_seconds


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    (tmp_path / "foresay.service").write_text(UNIT.replace("/opt/foresay/.venv/bin/foresay", "/bin/true"))
    command = ["systemd-analyze", "verify", str(tmp_path / "foresay.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_variables_that_are_written_about_are_settings() -> None:
    known = {setting.variable for setting in all_settings().values()} | {"FORESAY_CONFIG"}
    written = (PACKAGING / "README.md").read_text("utf-8") + UNIT + DOCKERFILE
    assert set(re.findall(r"FORESAY_[A-Z_]+[A-Z]", written)) <= known


@pytest.mark.parametrize("status", [0, 3])
def test_make_shows_what_pip_says_only_if_it_fails(status, tmp_path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nseq 170\necho no space left >&2\nexit {status}\n")
    python.chmod(0o755)
    outermost = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", ".venv/.installed"], cwd=tmp_path, env=outermost, capture_output=True, text=True)
    output = (tmp_path / ".venv/install.log").read_text()
    assert output.splitlines() == [*map(str, range(1, 171)), "no space left"]
    assert len(done.stdout.splitlines()) == 1 and "1 to 5 minutes" in done.stdout
    assert (done.returncode == 0) == (tmp_path / ".venv/.installed").exists() == (status == 0)
    if status:
        assert output in done.stderr and "==> pip failed; the lines above are in .venv/install.log too" in done.stderr
    else:
        assert done.stderr == ""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
LINES = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, LINES)}


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return specifier.version


@pytest.mark.parametrize("wanted", DIRECT, ids=lambda wanted: wanted.name)
def test_every_direct_dependency_is_pinned_within_its_bound(wanted: Requirement) -> None:
    if wanted.name == "setuptools":  # comes with torch, which bounds it
        return
    assert wanted.specifier.contains(version_of(PINS[canonicalize_name(wanted.name)]))
    assert all(specifier.operator == ">=" for specifier in wanted.specifier)


def test_pins_are_plain_versions() -> None:
    """No local versions such as 2.13.0+cpu and no addresses: they would tie the project to one package index."""
    assert version_of(PINS[canonicalize_name("torch")]) == "2.13.0"
    for pin in PINS.values():
        assert pin.url is None
        assert "+" not in version_of(pin)
