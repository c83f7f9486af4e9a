"""What docstrings and docs refer to is there: modules, classes and functions by their names, files by their paths; and
a name is that of one class.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kvpaging", "spec", "verifier", "drafters", "server", "bench", "tests")
SOURCES = sorted(path for folder in (*FOLDERS, "foresay") for path in (ROOT / folder).glob("**/*.py"))
SOURCES.remove(Path(__file__).resolve())  # it names what is not there
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):`~?([\w.]+)`")
_OURS = re.compile(rf"`(foresay\.(?:{'|'.join(FOLDERS)})(?:\.\w+)*)`")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w/.-]*\.(?:py|sh|json|md)\b")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def members(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What is defined here, by name: of a class its attributes too."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from ((name.id, node) for name in names)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from members([*node.body, *node.orelse])


def attributes(of: ast.ClassDef) -> dict[str, ast.stmt]:
    assigned = {
        node.attr: of
        for node in ast.walk(of)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {**assigned, **dict(members(of.body))}


def module_file(dotted: str) -> Path | None:
    """The file of a module by the name that it is imported by; an empty path for a package without one."""
    first, *rest = dotted.split(".")
    folder = ROOT / (first if first != "foresay" else rest.pop(0) if rest and rest[0] in FOLDERS else "foresay")
    place = folder.joinpath(*rest)
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.exists():
            return path
    return None


def is_there(dotted: str) -> bool:
    """Whether a name that begins with a package leads to something."""
    names = dotted.split(".")
    for count in range(len(names), 0, -1):
        path = module_file(".".join(names[:count]))
        if path is not None:
            return leads_on(dict(members(tree_of(path).body)), names[count:])
    return False


def leads_on(known: dict[str, ast.stmt], names: list[str]) -> bool:
    """Whether names, each of the one before, are defined; what is imported, or inherited, is taken to have them."""
    if not names:
        return True
    node = known.get(names[0])
    if isinstance(node, ast.ClassDef):
        return leads_on(attributes(node), names[1:]) or bool(node.bases and names[1:])
    return node is not None and (len(names) == 1 or isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign)))


def is_known_in(path: Path, name: str) -> bool:
    """Whether a reference without a package is to something of the module, or of one of its classes."""
    known = dict(members(tree_of(path).body))
    classes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    return leads_on(known, name.split(".")) or any(leads_on(attributes(of), name.split(".")) for of in classes)


def broken(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    joined = re.sub(r"\n\s*", "", text)  # a long name may be on two lines
    found = []
    for name in {*_ROLE.findall(text), *_ROLE.findall(joined), *_OURS.findall(text)}:
        whole = name.partition(".")[0] in ("foresay", "bench", "tests")
        if not (is_there(name) if whole else path.suffix == ".md" or is_known_in(path, name)):
            found.append(name)
    return sorted(found + [name for name in set(_PATH.findall(text)) if not (ROOT / name).exists()])


@pytest.mark.parametrize("files", [SOURCES, DOCS], ids=["docstrings", "docs"])
def test_every_reference_leads_somewhere(files: list[Path]) -> None:
    assert len(files) > 10
    assert [f"{path.relative_to(ROOT)}: {name}" for path in files for name in broken(path)] == []


def test_what_leads_nowhere_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""Of :mod:`foresay.spec.step`, :meth:`foresay.spec.step.StepRunner.run` and spec/step.py; :func:`nobody`,\n'
        ':mod:`foresay.spec.nowhere`, :meth:`foresay.spec.step.StepRunner.walk`, :mod:`.step`, spec/nowhere.py."""\n'
    )
    nowhere = ["nobody", "foresay.spec.nowhere", "foresay.spec.step.StepRunner.walk", ".step", "spec/nowhere.py"]
    assert sorted(broken(source)) == sorted(nowhere)


def test_a_name_is_that_of_one_class() -> None:
    paths = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in FOLDERS[:5]]
    names = Counter(node.name for path in paths for node in tree_of(path).body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
