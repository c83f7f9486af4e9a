"""EngineCore processes whose engine is patched as they start: such as one that checks its page ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent

import pytest

#: Whenever nothing runs, the engine proves its page ledger; if it does not add up, the process ends.
CHECKING = """
import sys

if "foresay.server.engine_process.process" in sys.orig_argv:
    from foresay.spec.engine import EngineCore

    notify = EngineCore.notify

    def checking(engine):
        notify(engine)
        if not engine.has_work:
            engine.check()

    EngineCore.notify = checking
"""

#: While there is a file ``slow`` in its folder, a step takes 20 ms more, or as many seconds as are written there; while
#: there is one ``held``, no engine gets ready. So a test that a busy machine holds up still finds streams running, and
#: models loading.
PACED = """
import os, sys, time

if "foresay.server.engine_process.process" in sys.orig_argv:
    from foresay.spec.engine import EngineCore

    folder, init, step = os.path.dirname(__file__), EngineCore.__init__, EngineCore.step

    def held(engine, *arguments, **options):
        while os.path.exists(folder + "/held"):
            time.sleep(0.01)
        init(engine, *arguments, **options)

    def slow(engine):
        try:
            with open(folder + "/slow") as file:
                time.sleep(float(file.read() or 0.02))
        except FileNotFoundError:
            pass
        return step(engine)

    EngineCore.__init__, EngineCore.step = held, slow
"""


def patched_path(code: str, folder: Path) -> str:
    """The PYTHONPATH of processes that run ``code`` first, and end if it fails: Python itself would go on without."""
    failed = "except BaseException:\n    import os, traceback\n    traceback.print_exc()\n    os._exit(70)\n"
    (folder / "sitecustomize.py").write_text(f"try:\n{indent(code, '    ')}\n{failed}")
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def patch_engines(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engine processes run ``code`` first."""
    monkeypatch.setenv("PYTHONPATH", patched_path(code, folder))


@contextmanager
def existing(file: Path, text: str = "") -> Iterator[None]:
    """A file that is there in the meantime. text: what it holds."""
    file.write_text(text)
    try:
        yield
    finally:
        file.unlink()
