"""The table of clients says which versions the suite ran with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients import table
from tests.clients.npm import NODE, PINS, installed, needs_npm


def test_the_page_has_the_current_table():
    page = table.PAGE.read_text("utf-8")
    assert page == table.renewed(page), "python -m tests.clients.table"


@pytest.mark.parametrize("client", [one for one in table.CLIENTS if one.source == "PyPI"], ids=lambda one: one.name)
def test_python_clients_are_of_these_versions(client):
    for package in client.packages:
        assert version(package) == table.pinned("PyPI", package)


@pytest.mark.outside
@pytest.mark.parametrize(
    "package", [package for one in table.CLIENTS if one.source == "Makefile" for package in one.packages]
)
def test_clients_with_an_environment_are_of_these_versions(package):
    python = Path(sys.prefix) / package.removesuffix("-chat") / "bin" / "python"
    if not python.exists() and not os.environ.get("CI"):
        pytest.skip("make outside installs it")
    line = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == table.pinned("Makefile", package)


@pytest.mark.outside
@needs_npm
def test_clients_from_npm_are_of_these_versions():
    assert {package: installed(package) for package in PINS} == PINS
    assert {package for one in table.CLIENTS if one.source == "npm" for package in one.packages} == set(PINS)


def test_npm_versions_are_pinned_and_tied_to_no_registry():
    assert all(pin[0].isdecimal() for pin in PINS.values())
    lock = json.loads((NODE / "package-lock.json").read_text("utf-8"))
    assert lock["packages"][""]["dependencies"] | lock["packages"][""]["optionalDependencies"] == PINS
    assert [name for name, entry in lock["packages"].items() if "resolved" in entry] == []


def test_every_file_that_is_named_is_there():
    for client in table.CLIENTS:
        assert all((table.ROOT / place).exists() for place in client.tests.split(", ")), client.name
