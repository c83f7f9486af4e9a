"""What users read is English as a native speaker writes it: errors, warnings, log lines, help texts, the page, docs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "server" / "api" / "about" / "static"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PACKAGES = ("server", "spec", "drafters", "verifier", "kvpaging")
#: Each with a sentence that it is there to find.
PATTERNS = {
    r"\bbehind\b(?! nginx| (a|the|your)\b.*\b(proxy|nginx))": "the state behind the target's final norm",
    r"\bwhoever\b(?! (brings|changes))": "whoever serves them joins",
    r"\b(nobody|somebody)\b(?! thought| else)": "Steps by who was to draft in them (none: nobody)",
    r"\bof its time\b(?! waiting)": "of its time the engine waits 65% for a core",
    r"\bhung up on\b": "who reads nothing for 20 s is hung up on",
    r"^Those of\b": "Those of your key.",
    r"\bthat its place\b|\bits place is\b": "From then on that its place is wanted, a model takes no more",
    r"\bfor nothing\b": "whose forced tokens are drafted for nothing",
    r"\bwhat learns\b": "what learns learns from its hidden states",
    r"\b(is|are) (not )?told\b|\btold (this|of)\b": "the model is not told of this one",
    r"\bstands?\b (there|behind|for|in)\b": "the path [0] stands there twice",
    r"\banew\b": "move it away to start anew",
    r"\b(?<!there )is no (?!longer\b|more\b)": "Own is no drafter, it lacks propose",
    r"(?<!there )\b(is|are) none\b": "it holds tokens that are none of the 1000",
    r"\bof so (many|long)\b|\b(run|keep) so many\b|\bfor so long\b": "draft a chain of so many tokens",
    r"\bgoes with (every|--)|does not go with\b": "it does not go with --replicas",
    r"\bexclude each other\b": "prompt and messages exclude each other",
    r"\bhad to make room\b": "it was not stored, or it had to make room",
    r"\b(are|is) for [\w ]+ alone\b": "medusa:PATH and dspark:PATH are for heads alone",
    r"\bsupported are\b": "GGUF version 9; supported are 2 and 3",
    r"\bwr(ite|ites|ote) on\b|\bwritten on\b": "write on past the model's end-of-text token",
    r"\bmend\b|\bput right\b": "and what would mend it",
    r"\b(server|constructor) wants\b": "This server wants an API key",
    r"\bin the way of\b|\bin the place of\b": "serve a model over HTTP, in the way of OpenAI's API",
    r"\bthe engine before\b": "the engine before serves on",
    r"\b(that|which|who) (is|are|was|were) [\w-]+ed (already|there)\b": "what runs that is loaded already",
    r"\bcomes for it\b|\bit rests on are\b": "the steps without drafts it rests on are few",
    r"\btake (them|keys|all keys) back\b": "make API keys for the server, list them, and take them back",
    r"\blet(ting)? (in|a request in)\b": "From letting a request in to its end",
    r"\bwas weighed\b": "Drafting, as it was weighed",
    r"\bwhat (runs|answers|writes)\b": "what runs is finished, nothing new is taken",
}


class Texts(ast.NodeVisitor):
    """The texts in a module, by line: without docstrings, and without what our own mistakes say."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Says something to us alone."""

    def visit_Call(self, node: ast.Call) -> None:
        if getattr(node.func, "id", "") not in ("AssertionError", "RuntimeError"):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        self.found.append((node.lineno, "".join(map(str, parts))))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append((node.lineno, node.value))


def of_script(source: str) -> Iterator[tuple[int, str]]:
    """The texts in a script, by line, without its comments."""
    source = re.sub(r"/\*.*?\*/|^\s*//[^\n]*", lambda found: "\n" * found[0].count("\n"), source, flags=re.S | re.M)
    for found in re.finditer(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`', source):
        yield source.count("\n", 0, found.start()) + 1, found[1] or found[2] or ""


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """The texts of at least three words in a file, by line."""
    source = file.read_text()
    if file.suffix == ".py":
        scan = Texts()
        scan.visit(ast.parse(source))
        found: Iterable[tuple[int, str]] = scan.found
    elif file.suffix == ".js":
        found = of_script(source)
    else:
        found = enumerate(re.sub(r"<[^>]*>", " ", source).splitlines(), 1)
    return ((line, text) for line, text in found if len(text.split()) >= 3)


def files() -> list[Path]:
    python = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return python + sorted([*PAGE.glob("*.js"), *PAGE.glob("*.html")])


def prose(document: Path) -> Iterator[str]:
    """The paragraphs of a document, tables and lists whole; without code, quotes of code and the targets of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", document.read_text("utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text))
    return (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))


@pytest.mark.parametrize(("pattern", "example"), PATTERNS.items())
def test_each_pattern_finds_its_example(pattern: str, example: str) -> None:
    assert re.search(pattern, example, re.I)


def test_nothing_that_users_read_is_in_the_order_of_another_language() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text[:100]!r} has {pattern}"
        for file in files()
        for line, text in texts(file)
        for pattern in PATTERNS
        if re.search(pattern, text, re.I)
    ]
    assert not found, "\n".join(found)


def test_neither_are_the_documents() -> None:
    found = [
        f"{document.name}: {paragraph[max(0, match.start() - 50) : match.end() + 50]!r} has {pattern}"
        for document in DOCS
        for paragraph in prose(document)
        for pattern in PATTERNS
        for match in re.finditer(pattern, paragraph, re.IGNORECASE)
    ]
    assert len(DOCS) > 20 and not found, "\n".join(found)


def test_texts_are_found_and_docstrings_and_comments_are_not() -> None:
    scan = Texts()
    scan.visit(ast.parse('def f():\n    """whoever"""\n    assert x, "whoever"\n    raise E(f"one {y} two")\n'))
    assert scan.found == [(4, "one X two")]
    assert list(of_script('// "whoever"\n/** "whoever" */ let a = "one two", b = `${a} three`;')) == [
        (2, "one two"),
        (2, "${a} three"),
    ]
