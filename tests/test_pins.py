"""Lower bounds in pyproject.toml, tested versions in constraints.txt, and the two agree."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
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
