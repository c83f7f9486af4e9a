"""Progress: a bar for people, lines for logs."""

from __future__ import annotations

import os
import pty
import re
import sys

import pytest

from foresay.drafters.training.progress import ProgressBar


def test_lines_where_there_is_no_terminal(monkeypatch, capsys) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with ProgressBar("the head learns", 100, "steps", first=20) as bar:
        for done in range(21, 41):
            now[0] += 4.0
            bar.to(done, f"loss {done / 10:.3f}")
    assert capsys.readouterr().err.splitlines() == [
        "the head learns: 28 of 100 steps, 0:00:32 so far, about 0:04:48 left, loss 2.800",
        "the head learns: 36 of 100 steps, 0:01:04 so far, about 0:04:16 left, loss 3.600",
    ]


def test_nothing_where_nothing_is_wanted(monkeypatch, capsys) -> None:
    monkeypatch.setattr("foresay.drafters.training.progress.LINE_EVERY", 0.0)
    with ProgressBar("the head learns", 10, "steps", shown=False) as bar:
        bar.to(3)
    assert capsys.readouterr().err == ""


def test_a_bar_with_the_time_left_on_a_terminal(monkeypatch) -> None:
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with ProgressBar("the target writes", 40, "texts", first=10) as bar:
            bar.to(25)
            bar.to(40, "loss 4.2")
        terminal.flush()
        shown = ""
        while "40/40 texts loss 4.2" not in shown:
            shown += os.read(reader, 10_000).decode()
    os.close(reader)
    assert re.search("the target writes .* .{,5}25%", shown), "it begins where the run was"


@pytest.mark.parametrize("done", [0, 5])
def test_no_guess_before_something_is_done(monkeypatch, capsys, done) -> None:
    monkeypatch.setattr("foresay.drafters.training.progress.LINE_EVERY", 0.0)
    with ProgressBar("the head learns", 10, "steps", first=5) as bar:
        bar.to(max(5, done))
    assert "left" not in capsys.readouterr().err
