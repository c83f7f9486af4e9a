"""The test files of what was changed since the last commit: ``python -m tests.changed`` prints them for make quick."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Modules that more files import are everybody's: the spine stands for those.
MOST = 12


def changed() -> list[str]:
    """Python files that git calls modified, added or unknown."""
    listed = ["git", "ls-files", "--modified", "--others", "--exclude-standard", "*.py"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    return [name for name in found if (ROOT / name).exists()]


def tests_of(name: str, sources: dict[str, str]) -> list[str]:
    """The files of tests that import a module; a file of tests is its own. sources: of all such files, by name."""
    if name in sources:
        return [name]
    inside = "" if name.startswith(("tests/", "bench/")) else "foresay."
    package, _, module = (inside + name.removesuffix(".py").replace("/", ".")).removesuffix(".__init__").rpartition(".")
    named = re.compile(rf"{re.escape(package)}(\.{module}\b| import [^\n]*\b{module}\b)")
    found = [each for each, source in sources.items() if named.search(source)]
    return found if len(found) <= MOST else []


def main() -> None:
    files = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    sources = {name: (ROOT / name).read_text("utf-8") for name in files}
    print(*sorted({test for name in changed() for test in tests_of(name, sources)}))


if __name__ == "__main__":
    main()
