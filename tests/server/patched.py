"""Engine processes whose engine is patched as they start: such as one that checks its page ledger."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foresay.server.host.child import Spares

#: Whenever nothing runs, the engine proves its page ledger; if it does not add up, the process ends.
CHECKING = """
import sys

if "foresay.server.host.process" in sys.orig_argv:
    from foresay.spec.engine import Engine

    tell = Engine.tell

    def checking(engine):
        tell(engine)
        if not engine.has_work:
            engine.check()

    Engine.tell = checking
"""


def patched_engines(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Spares:
    """What starts engine processes that run ``code`` first."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return Spares()
