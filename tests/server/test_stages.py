"""What is shown until an engine is ready: one line on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from foresay.server.cli.progress import Stages
from foresay.server.settings.resolved import BUNDLED
from tests.server.live import LiveServer
from tests.server.terminal import Terminal


def shown(text: str) -> str:
    """What is left on the screen of one line that is rewritten."""
    return re.sub(r"\x1b\[\d*m", "", text.rpartition("\r\x1b[K")[2])


def test_a_line_for_each_stage_where_nobody_looks() -> None:
    out = io.StringIO()
    with Stages(out, lines=True) as stages:
        for share in (None, 0.5, 1.0):
            stages("reading weights", share)
        stages("probing exactness")
    stages("too late")
    assert re.fullmatch(r" +\d+\.\d s  reading weights\n +\d+\.\d s  probing exactness\n", out.getvalue())


def test_nothing_is_shown_of_a_command_whose_output_is_its_answer() -> None:
    out = io.StringIO()
    with Stages(out) as stages:
        stages("reading weights")
    assert out.getvalue() == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_warning_is_written_at_once_and_stays(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = kind()
    with Stages(out) as stages:
        stages("finding the models")
        stages("warning: few tokens are shared")
        assert "warning: few tokens are shared\n" in re.split(r"\r\x1b\[K", out.getvalue())[-1]
        stages("reading weights")
    assert out.getvalue().count("few tokens") == 1
    assert stages.warned == {"warning: few tokens are shared"}


def test_one_line_on_a_terminal_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    with Stages(out, lines=True) as stages:
        stages("reading weights", 0.43)
        assert re.fullmatch(r" +\d+\.\d s  reading weights, 43% \.\.\.", shown(out.getvalue()))
        stages("x" * 100)
        assert len(shown(out.getvalue())) == 39
    assert "\n" not in out.getvalue()
    assert shown(out.getvalue()) == ""


def test_a_terminal_that_cannot_rewrite_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with Stages(out, lines=True) as stages:
        stages("reading weights")
    assert "\x1b" not in out.getvalue() and out.getvalue().endswith("reading weights\n")


def test_serve_names_every_stage_then_both_addresses(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED / "target", tmp_path / "target")  # of which nobody has measured anything
    arguments = [str(tmp_path / "target"), "--draft", str(BUNDLED / "draft") + ",suffix"]
    with LiveServer(tmp_path / "log", *arguments, measures=True) as server:
        url = server.wait_for_url()
        lines = server.output.splitlines()
        requested = json.dumps({"model": "target", "prompt": "Once", "max_tokens": 2}).encode()
        for _ in range(2):
            urlopen(
                Request(f"{url}/v1/completions", requested, {"Content-Type": "application/json"}), timeout=60
            ).close()
        server.terminate()
        assert server.process.wait(180) == 0
        assert server.output.splitlines()[-1] == "Foresay stopped."
    ready = lines.index("Foresay is ready.")
    times, stages = zip(*(line.split(" s  ") for line in lines[:ready]), strict=True)
    assert list(map(float, times)) == sorted(map(float, times))
    assert stages == (
        "starting the engine process",
        "finding the models",
        "reading the target's weights",
        "packing the target's weights",
        "reading the draft model's weights",
        "packing the draft model's weights",
        "probing exactness",
        "reading the fingerprint",
        "measuring the step cost",
        "measuring what drafting costs",
        "timing plain steps",
    )
    assert lines[lines.index(f"page      {url}/") + 1] == f"API       {url}/v1"
    assert "warning" not in server.output and "anyone" not in server.output
