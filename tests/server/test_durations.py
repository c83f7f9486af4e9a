from __future__ import annotations

import pytest

from foresay.server.settings.config import ServeConfig
from foresay.server.settings.load import load
from foresay.server.settings.units import seconds_of, span_in_words
from foresay.spec.errors import ConfigurationError

SPANS = {"30s": 30, "10m": 600, "2h": 7200, "1h30m": 5400, "1.5h": 5400, "250ms": 0.25, "5us": 5e-6, "0s": 0}
SPANS |= {"-1m": -60, "+1m": 60, ".5s": 0.5, "1.s": 1, "1h0m30s": 3630}


@pytest.mark.parametrize("span", SPANS)
def test_spans(span):
    assert seconds_of(span) == pytest.approx(SPANS[span])


@pytest.mark.parametrize("span", ["", "5", "m", "5 m", "1d", "--1m", "1m-1s", "5m5", "1e3s", "٣s", "5M", "5m\n", "s5"])
def test_what_is_none(span):
    with pytest.raises(ValueError, match="is not a time such as 30s"):
        seconds_of(span)


def test_a_long_one_is_refused_at_once():
    with pytest.raises(ValueError, match="is not a time"):
        seconds_of("1h" * 100_000 + "!")


@pytest.mark.parametrize(("seconds", "words"), [(1, "1 s"), (0.25, "0.25 s"), (90, "90 s"), (600, "10 min")])
def test_in_words(seconds, words):
    assert span_in_words(seconds) == words


def test_hours_in_words():
    assert [span_in_words(seconds) for seconds in (3600, 5400, 7260)] == ["1 h", "1 h 30 min", "2 h 1 min"]


def test_as_a_setting():
    assert load(ServeConfig, {"idle_unload": "10m"}, {}).config.idle_seconds == 600
    assert ServeConfig().idle_seconds is None
    for wrong in ("10", "soon", "-10m", "0s"):
        with pytest.raises(ConfigurationError, match=r"idle.unload must be"):
            load(ServeConfig, {"idle_unload": wrong}, {})
