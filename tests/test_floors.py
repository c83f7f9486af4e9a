"""Imports run one way only: server > drafters > verifier > spec > kvpaging; nothing imports bench or tests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STANDARD = frozenset(sys.stdlib_module_names)

#: What each floor may import besides itself and the standard library. Only the server may use transformers, so the
#: forward pass cannot.
FLOORS: dict[str, frozenset[str]] = {
    "kvpaging": frozenset({"torch", "numpy"}),
    "spec": frozenset({"torch", "numpy", "msgspec", "kvpaging"}),
    "verifier": frozenset(
        {"torch", "numpy", "msgspec", "triton", "llvmlite", "safetensors", "tqdm", "huggingface_hub"}
        | {"spec", "kvpaging"}
    ),
    "drafters": frozenset({"torch", "numpy", "msgspec", "verifier", "spec", "kvpaging"}),
    "server": frozenset(
        {"torch", "numpy", "msgspec", "aiohttp", "jinja2", "llguidance", "rich", "tokenizers", "tqdm", "transformers"}
        | {"prometheus_client"}
        | {"foresay", "drafters", "verifier", "spec", "kvpaging"}
    ),
    "foresay": frozenset({"server", "spec"}),
}


def files_of(floor: str) -> list[Path]:
    folder = ROOT / floor
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{floor}.py"]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import in a file, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} uses a relative import; write the package's name"
            yield node.lineno, (node.module or "").partition(".")[0]


def violations(floor: str) -> list[str]:
    allowed = FLOORS[floor] | STANDARD | {floor}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for path in files_of(floor)
        for line, package in imports_of(path)
        if package not in allowed
    ]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_what_lies_below(floor: str) -> None:
    assert files_of(floor), f"{floor} has no files"
    assert violations(floor) == []


def test_every_package_of_the_wheel_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    assert packages == set(FLOORS) - {"foresay"}


def test_the_reader_sees_what_a_file_imports(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("import os.path\ndef f():\n    from bench.drive import run\n    import torch.nn as nn\n")
    assert list(imports_of(source)) == [(1, "os"), (3, "bench"), (4, "torch")]
