"""What a notebook shows while an engine loads, and that nothing else shows anything."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from foresay import ConfigurationError, Engine
from foresay.server.engine_process.text_stream import loading


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the kernel of a notebook was given to show in one cell, in order."""
    found: list[dict[str, str]] = []

    def display(data: dict[str, str], **how: Any) -> SimpleNamespace:
        assert how == {"raw": True, "display_id": True}
        found.append(data)
        return SimpleNamespace(update=lambda data, raw: found.append(data))

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def test_a_notebook_shows_what_is_loaded_and_then_how_long_it_took(shown: list[dict[str, str]]) -> None:
    Engine("bundled", "none", max_model_len=64, dtype="float32").close()
    lines = [data["text/plain"] for data in shown]
    assert any(line.endswith("s: reading the target's weights ...") for line in lines), lines
    assert lines[-1].startswith("loaded in ")


def test_a_share_is_a_bar_and_what_comes_is_text(shown: list[dict[str, str]]) -> None:
    with loading(None) as progress:
        assert progress is not None
        progress("reading <b>", 0.5)
    assert "reading &lt;b&gt;, 50% ..." in shown[0]["text/html"] and '<progress value="0.50"' in shown[0]["text/html"]


def test_what_cannot_be_loaded_leaves_no_line(shown: list[dict[str, str]]) -> None:
    with pytest.raises(ConfigurationError, match=r'draft ngrma: there is nothing of that name; did you mean "ngram"\?'):
        Engine("bundled", "ngrma")
    assert [data["text/plain"] for data in shown] == [""]


def test_who_brings_a_progress_has_no_line(shown: list[dict[str, str]]) -> None:
    def own(phase: str, share: float | None = None) -> None:
        pass

    with loading(own) as progress:
        assert progress is own
    assert shown == []


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_scripts_and_terminals_stay_quiet(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with loading(None) as progress:
        assert progress is None
