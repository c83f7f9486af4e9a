"""What ends Gemma 4's layers on the simulated device: captured steps gather embeddings of layers without the host."""

from __future__ import annotations

from collections import Counter

import pytest

from foresay.server.engine.build import build_engine
from foresay.server.settings.units import bytes_in_words
from tests.same_tokens.test_directories import config
from tests.simulated.device import simulated
from tests.simulated.test_engine import build_there, texts
from tests.simulated.test_mixtures import short_of_room
from tests.simulated.test_waits import ONCE, steps

FAMILY = "gemma4_embedded"


@pytest.mark.slow
def test_a_table_in_the_hosts_memory_changes_no_token(pair, monkeypatch) -> None:
    """Where the device lacks a byte for it: steps read it there, and wait as often as before."""
    directory = pair(FAMILY, layers=4).directory
    settings = config(directory, "none", max_seqs=2, max_model_len=160, kv_tokens=1200)
    build_there(monkeypatch)
    with simulated():
        wanted = texts(build_engine(settings))
        sizes = short_of_room(monkeypatch, settings)
        engine = build_engine(settings)
        assert texts(engine) == wanted
        found = list(steps(engine, engine.info.vocab_size, 2))[2:]
    assert Counter(found).most_common(1)[0][0] == ONCE._replace(copies=0), found
    assert sizes == [320 * 4 * 32 * 4]
    said = f"a table of embeddings per layer, {bytes_in_words(sizes[0])}, is read in the host's memory"
    assert said in engine.info.memory
