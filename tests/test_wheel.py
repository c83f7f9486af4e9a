"""The wheel holds the five packages, foresay.py and the bundled pair; never tests or bench. Installed, it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("drafters", "kvpaging", "server", "spec", "verifier")
#: What building needs; copied, so that no build folder or egg-info lands in the checkout.
SOURCES = (*PACKAGES, "tests", "bench", "docs", "foresay.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as it is, offline: the build backend comes with torch, which needs setuptools."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, checkout / name)
    build = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
    ]
    done = subprocess.run([sys.executable, *build, str(checkout)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("foresay-*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources | {"foresay.py"}
    assert {Path(name).parts[0] for name in files} == {*PACKAGES, "foresay.py"}


def test_the_wheel_holds_the_bundled_models_whole(wheel: zipfile.ZipFile) -> None:
    bundled = ROOT / "server" / "bundled"
    here = {str(path.relative_to(ROOT)): path.stat().st_size for path in bundled.rglob("*") if path.is_file()}
    packed = {entry.filename: entry.file_size for entry in wheel.infolist() if "server/bundled/" in entry.filename}
    assert packed == here
    assert any(name.endswith(".safetensors") for name in packed)


def test_the_wheel_is_typed_and_licensed(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert any(name.endswith("LICENSE") for name in names)
    metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert (
        "foresay = server.cli.main:main"
        in wheel.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    )


def installed(wheel: zipfile.ZipFile, folder: Path) -> Path:
    """The programs of a new environment that holds the wheel, and looks for all that it needs in ours."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel.filename)], check=True, cwd=folder)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    own = folder / "lib" / version / "site-packages"
    # A line of a .pth file is one more folder of modules; the .pth files in there, of editable installs, are not read.
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_serves_the_bundled_pair_in_an_environment_of_its_own(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORESAY_", "PYTHON"))}
    environment = kept | {"OMP_NUM_THREADS": "1"}
    code = "import server, spec; print(server.__file__, spec.__file__)"
    found = subprocess.check_output([programs / "python", "-c", code], cwd=elsewhere, env=environment, text=True)
    assert all(Path(file).is_relative_to(tmp_path / "venv") for file in found.split())
    command = [str(programs / "foresay"), "serve", "--port", "0"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stderr=log, cwd=elsewhere, env=environment) as server,
    ):
        try:
            url = address(server, tmp_path / "log")
            body = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 20, "seed": 1}
            asked = urllib.request.Request(
                f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                said = json.load(answer)
            with urllib.request.urlopen(url.removesuffix("/v1") + "/dashboard", timeout=60) as page:
                assert b"<title>" in page.read()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert said["usage"]["completion_tokens"] == 20 and said["choices"][0]["text"]
    assert said["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Of the API, once the banner names it."""
    deadline = time.monotonic() + 180
    while (found := re.search(r"API +(http://\S+)", log.read_text())) is None:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[1]
