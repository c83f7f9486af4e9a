"""Imports run one way only: server > drafters > verifier > spec > kvpaging; nothing imports bench or tests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STANDARD = frozenset(sys.stdlib_module_names)

#: What each floor may import besides itself and the standard library. Only the server and the training may use
#: transformers, so the forward pass cannot.
FLOORS: dict[str, frozenset[str]] = {
    "kvpaging": frozenset({"torch", "numpy"}),
    "spec": frozenset({"torch", "numpy", "msgspec", "kvpaging"}),
    "verifier": frozenset(
        {"torch", "numpy", "msgspec", "triton", "llvmlite", "regex", "safetensors"} | {"spec", "kvpaging"}
    ),
    "drafters": frozenset({"torch", "numpy", "msgspec", "verifier", "spec", "kvpaging"}),
    "drafters/training": frozenset(
        {"torch", "jinja2", "rich", "transformers", "drafters", "verifier", "spec", "kvpaging"}
    ),
    "server": frozenset(
        {"torch", "numpy", "msgspec", "aiohttp", "jinja2", "llguidance", "rich", "tokenizers", "transformers"}
        | {"prometheus_client", "prompt_toolkit", "markdown_it", "huggingface_hub"}
        | {"foresay", "drafters", "verifier", "spec", "kvpaging"}
    ),
    "server/replicas": frozenset({"ray", "msgspec", "server", "spec", "kvpaging"}),
    "foresay": frozenset({"server", "spec"}),
}


OURS = frozenset(floor for floor in FLOORS if "/" not in floor) - {"foresay"}

#: The rooms of the server, from the ground up: each imports itself and those before it.
ROOMS = ("catalog", "settings", "schemas", "gateway", "text", "engine", "metrics", "engine_process", "replicas",
         "models", "api", "http", "cli")  # fmt: skip


def files_of(floor: str) -> list[Path]:
    """Those of a floor, without those of a floor within it."""
    folder = ROOT / floor
    within = [ROOT / other for other in FLOORS if other.startswith(f"{floor}/")]
    return [path for path in sorted(folder.rglob("*.py")) if not any(path.is_relative_to(one) for one in within)]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, those inside functions and TYPE_CHECKING included. What is
    imported from a module has its name behind the module's."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} uses a relative import; write the package's name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(floor: str) -> list[str]:
    allowed = FLOORS[floor] | STANDARD | {floor.partition("/")[0]}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files_of(floor)
        for line, name in imports_of(path)
        if package_of(name) not in allowed
    ]


def package_of(name: str) -> str:
    """The package that an import is from. A floor of ours by the name under which it is installed, and no other."""
    first, _, rest = name.partition(".")
    inside = rest.partition(".")[0]
    if first == "foresay" and inside in OURS:
        return inside
    return f"{first}, which is foresay.{first}" if first in OURS else first


@cache
def graph(floor: str = "server") -> dict[str, list[str]]:
    """The modules of a floor, floors within it included, each with those of them that it imports."""
    paths = {dotted(path): path for path in sorted((ROOT / floor).rglob("*.py"))}
    return {name: list(dict.fromkeys(_modules(imports_of(path), paths))) for name, path in paths.items()}


def dotted(path: Path) -> str:
    """The module's name; a package's without ``__init__``."""
    return ".".join(("foresay", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def _modules(imports: Iterator[tuple[int, str]], known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that imports are from."""
    for _, name in imports:
        yield from (one for one in (name, name.rpartition(".")[0]) if one in known and known[one].stem != "__init__")


def cycle(imports: Mapping[str, Sequence[str]]) -> list[str]:
    """Modules that import each other in a ring; empty if there are none."""
    done: set[str] = set()

    def below(path: list[str]) -> list[str]:
        for name in imports[path[-1]]:
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done and (ring := below([*path, name])):
                return ring
        done.add(path[-1])
        return []

    return next((ring for name in imports if (ring := below([name]))), [])


def room_of(name: str) -> str:
    return name.removeprefix("foresay.server.").partition(".")[0]


def climbs(name: str, imported: str) -> bool:
    """Whether a module imports one from a room above its own, or one API another."""
    if room_of(name) == room_of(imported) == "api":
        return imported.split(".")[3] not in (name.split(".")[3], "common")
    return ROOMS.index(room_of(name)) < ROOMS.index(room_of(imported))


def picture() -> str:
    """Each room of the server and those that it imports, the highest first."""
    lines = []
    for room in reversed(ROOMS):
        imported = {room_of(one) for name, found in graph().items() if room_of(name) == room for one in found}
        lines.append(f"{room:15}{' '.join(one for one in reversed(ROOMS) if one in imported - {room})}".rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_what_lies_below(floor: str) -> None:
    assert files_of(floor), f"{floor} has no files"
    assert violations(floor) == []


def test_every_package_of_the_wheel_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    assert packages == {floor.partition("/")[0] for floor in FLOORS}
    assert {path.name: path.readlink() for path in (ROOT / "foresay").iterdir() if path.is_symlink()} == {
        name: Path("..", name) for name in OURS
    }


@pytest.mark.parametrize("outside", ["bench", "tests"])
def test_what_is_outside_imports_us_by_our_name(outside: str) -> None:
    named = [
        f"{path.relative_to(ROOT)}:{line} imports {package_of(name)}"
        for path in files_of(outside)
        for line, name in imports_of(path)
        if ", which is" in package_of(name)
    ]
    assert named == []


def test_an_import_by_the_name_of_a_folder_is_refused(tmp_path: Path) -> None:
    """It would work in a checkout, and collide with anybody's `spec` or `server` elsewhere."""
    source = tmp_path / "module.py"
    source.write_text("import spec.step\nfrom server import host\nfrom foresay.spec.step import Step\nimport foresay\n")
    assert [package_of(name) for _, name in imports_of(source)] == [
        "spec, which is foresay.spec", "server, which is foresay.server", "spec", "foresay"
    ]  # fmt: skip


def test_the_rooms_of_the_server_import_downwards() -> None:
    found = [(name, one) for name, imported in graph().items() for one in imported if climbs(name, one)]
    assert found == []
    assert {path.parent.name for path in ROOT.glob("server/*/__init__.py")} == set(ROOMS)
    assert [path.name for path in ROOT.glob("server/*.py")] == ["__init__.py"]


@pytest.mark.parametrize("floor", sorted(OURS))
def test_no_modules_of_a_floor_import_each_other(floor: str) -> None:
    assert graph(floor)
    assert cycle(graph(floor)) == []


def test_what_climbs_is_seen() -> None:
    assert climbs("foresay.server.text.tokenizer", "foresay.server.api.common.route")
    assert climbs("foresay.server.api.ollama.chats", "foresay.server.api.anthropic.messages")
    assert climbs("foresay.server.api.common.route", "foresay.server.api.ollama.chats")
    assert not climbs("foresay.server.api.ollama.chats", "foresay.server.api.common.route")
    assert not climbs("foresay.server.cli.main", "foresay.server.api.ollama.chats")
    assert "foresay.server.settings.config" in graph()["foresay.server.cli.serve"]  # from within a room, and
    assert "foresay.server.engine_process.local" in graph()["foresay.server.cli.progress"]  # from within a function


def test_a_ring_is_found() -> None:
    assert cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert cycle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_the_reader_sees_what_a_file_imports(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("import os.path\ndef f():\n    from bench.drive import run\n    import torch.nn as nn\n")
    assert list(imports_of(source)) == [(1, "os.path"), (3, "bench.drive.run"), (4, "torch.nn")]


if __name__ == "__main__":
    print(picture())
