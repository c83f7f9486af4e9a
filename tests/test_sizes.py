"""Rooms and files may not grow past their numbers in ``sizes.toml``. ``python -m tests.test_sizes --write`` sets each
number that is larger than what it counts down to that.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SIZES = Path(__file__).with_name("sizes.toml")
ROOMS = ("spec", "verifier", "drafters", "kvpaging", "server", "bench", "tests")
RAISING = "the number only goes down: make room, or raise it in tests/sizes.toml in the commit that says why it has to"


def numbers() -> dict[str, dict[str, int]]:
    return tomllib.loads(SIZES.read_text("utf-8"))


def lengths(root: Path = ROOT) -> dict[str, int]:
    """The lines of each Python file, by its path from the root."""
    files = [file for room in ROOMS for file in sorted((root / room).rglob("*.py"))]
    return {file.relative_to(root).as_posix(): file.read_bytes().count(b"\n") for file in files}


def measured(kind: str, name: str, lines: Mapping[str, int]) -> int:
    """What a number of ``sizes.toml`` counts."""
    if kind == "files":
        return max(lines.values()) if name == "longest" else lines.get(name, 0)
    if kind == "words":
        return sum(len(page.read_text("utf-8").split()) for page in (ROOT / name).glob("*.md"))
    inside = [count for path, count in lines.items() if path.startswith(f"{name}/")]
    return sum(inside) if kind == "lines" else len(inside)


def grown(sizes: Mapping[str, Mapping[str, int]], lines: Mapping[str, int]) -> list[str]:
    """What is larger than its number; a file is held by the general one unless it has its own."""
    short = {path: count for path, count in lines.items() if path not in sizes["files"]}
    return [
        f"{name}: {count} {kind}, {number} at most; {RAISING}"
        for kind, named in sizes.items()
        for name, number in named.items()
        if (count := measured(kind, name, short if name == "longest" else lines)) > number
    ]


def write() -> None:
    """Set numbers down to today's sizes, and take out files that are as short as any other."""
    lines, sizes, kept, kind = lengths(), numbers(), [], ""
    for line in SIZES.read_text("utf-8").splitlines():
        kind = line.strip("[]") if line.startswith("[") else kind
        found = re.fullmatch(r'"?([\w/.]+)"? = \d+', line)
        if found and found[1] != "longest":
            size = min(sizes[kind][found[1]], measured(kind, found[1], lines))
            if kind == "files" and size <= sizes["files"]["longest"]:
                continue
            line = f"{line.partition(' = ')[0]} = {size}"
        kept.append(line)
    SIZES.write_text("\n".join(kept) + "\n", "utf-8")


def test_no_room_and_no_file_grows_past_its_number() -> None:
    assert grown(numbers(), lengths()) == []


@pytest.mark.parametrize(
    ("path", "count", "seen"),
    [
        ("verifier/probe.py", 13, ["verifier", "verifier/probe.py"]),
        ("verifier/model_runner.py", 9, ["verifier", "longest"]),
        ("verifier/ops/rows.py", 1, ["verifier", "verifier/ops"]),
    ],
)
def test_what_grows_is_seen(path: str, count: int, seen: list[str]) -> None:
    sizes = {
        "lines": {"verifier": 20},
        "modules": {"verifier/ops": 0},
        "files": {"longest": 8, "verifier/probe.py": 12},
    }
    lines = {"verifier/probe.py": 12, "verifier/model_runner.py": 8}
    assert grown(sizes, lines) == []
    assert [line.partition(":")[0] for line in grown(sizes, {**lines, path: count})] == seen


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
