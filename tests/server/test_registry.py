"""One entry for each kind of drafter, and nobody else tells their classes apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.drive import LOOKUPS
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.drafters.models import DraftModel
from foresay.server.engine.drafters.registry import ENTRIES, entry_of, settled
from foresay.server.settings.config import EngineConfig
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DRAFTERS, GRAMMAR, MTP, PREDICTION

ROOT = Path(__file__).resolve().parents[2]
#: Those that consist of others, which tell themselves apart; and whoever has logits, a base of kinds, from the rest.
_OF_OTHERS = {
    "drafters/combined.py": ["CombinedDrafter", "RoutedDrafter"],
    "drafters/proposer.py": ["TreeDrafter", "HiddenStateDrafter"],
}


def test_every_drafter_that_can_be_named_has_an_entry_of_its_own() -> None:
    names = [name for entry in ENTRIES for name in entry.names]
    # A target's own layer for further tokens, and a model that was made to be one: the latter is named with its files.
    names.remove(MTP)
    assert sorted(names) == sorted(set(DRAFTERS) - {PREDICTION, GRAMMAR})
    assert len({entry.made for entry in ENTRIES}) == len(ENTRIES)
    assert set(LOOKUPS) == {"ngram", "suffix"}
    for name, make in LOOKUPS.items():
        assert make().name == name
        assert name in entry_of(make()).names


def told_apart(path: Path) -> list[str]:
    """The drafters' classes that a file asks about."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    requested = [node.args[1] for node in calls if getattr(node.func, "id", "") in ("isinstance", "issubclass")]
    named = [getattr(part, "id", "") for question in requested for part in ast.walk(question)]
    return [name for name in named if name.endswith("Drafter")]


def test_no_other_module_distinguishes_their_classes() -> None:
    folders = ("spec", "verifier", "drafters", "server", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): told_apart(path) for path in files}
    assert {path: names for path, names in found.items() if names} == _OF_OTHERS


def test_models_draft_before_lookups_and_each_as_named() -> None:
    eagle, medusa, model, ngram, suffix = (
        next(entry for entry in ENTRIES if name in entry.names)(name)
        for name in ("eagle", "medusa", "draft_model", "ngram", "suffix")
    )
    assert settled([suffix, ngram, model], EngineConfig(), "x") == [model, suffix, ngram]
    with pytest.raises(ConfigurationError, match="names two of one kind; one head can draft, not several"):
        settled([eagle, suffix, medusa], EngineConfig(), "x")
    with pytest.raises(ConfigurationError, match="names two of one kind; one draft model can draft"):
        settled([model, DraftModel("other")], EngineConfig(), "x")


def test_the_page_names_what_an_entry_says() -> None:
    page = (ROOT / "docs" / "drafters.md").read_text("utf-8").partition("## Adding one to Foresay")[2]
    fields = {name for name in {**vars(Entry), **Entry.__annotations__, **vars(FromFiles)} if not name.startswith("_")}
    own = {"option", "location", "directory", "at", "setting", "files", "warning"}
    assert {name for name in fields - own if f"`{name}`" not in page} == set()
