"""The benchmark of being watched: what it makes of its rounds, and that it watches."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.http import Answer, ServerFailed
from bench.watched import Watcher, check_same, summarise
from tests.server.live import LiveServer


def answer(seconds: float, text: str = "a") -> Answer:
    return Answer(seconds, [seconds], text, 3)


def test_a_round_is_compared_with_itself() -> None:
    first = [(answer(2.0), answer(1.0)), (answer(2.0), answer(2.0))]
    second = [(answer(1.0), answer(1.0)), (answer(1.0), answer(1.0))]
    figures = summarise([first, second], max_tokens=10)
    assert figures["ratio_per_round"].median == pytest.approx((3 / 4 + 1) / 2)
    assert figures["tokens_per_s_on"].median == pytest.approx((20 / 4 + 20 / 2) / 2)
    assert figures["tokens_per_s_off"].median == pytest.approx((20 / 3 + 20 / 2) / 2)
    assert figures["ratio"].ratio == pytest.approx(0.5**0.25)
    assert figures["ratio"].low == pytest.approx(0.5**0.5) and figures["ratio"].high == pytest.approx(1.0)


def test_another_text_is_a_failure() -> None:
    check_same([answer(1.0)], [answer(2.0)])
    with pytest.raises(ServerFailed, match="differ"):
        check_same([answer(1.0, "b")], [answer(1.0)])


def test_a_run_that_nobody_watched_says_nothing() -> None:
    with pytest.raises(ServerFailed, match="nobody watched"):
        Watcher(1, deaf=False).check()


def test_watchers_watch_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.watched.SCRAPE_SECONDS", 0.2)
    with LiveServer(tmp_path / "log", "--threads", "1") as live:
        port = int(live.wait_for_url().rpartition(":")[2])
        for deaf in (False, True):
            watcher = Watcher(port, deaf)
            with watcher.watching():
                while watcher.scrapes < 3:
                    time.sleep(0.05)
            watcher.check()
            assert watcher.scrape_bytes > 3 * 10_000
            assert (watcher.feed_bytes > 1000) is not deaf
