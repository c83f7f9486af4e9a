"""The probe's finding is taken over from an earlier start of the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from foresay.server.engine.build import build_engine
from foresay.server.engine.handover import exactness_of
from foresay.server.settings.config import EngineConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.ops.kernels.cpu import kernel_cache
from tests.same_tokens import mutations
from tests.verifier.families import make
from tests.verifier.gguf_files import cache_of_its_own
from tests.verifier.reading import Reader, load_decoder

DAY = 86400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one entry is the time."""
    now = [1.8e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    (tmp_path / "cache/foresay/kernels").unlink()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("llama2")
    make("llama2", directory)
    return load_decoder(directory, probed=False)


@pytest.fixture
def reader(decoder: Decoder) -> Reader:
    return Reader(decoder)


def start(reader: Reader, of: str = "these") -> tuple[str, list[str]]:
    """A start: what is found, and what was done for it."""
    output: list[str] = []
    found = exactness_of(of, reader.model, reader.pool, output.append)
    assert found.exact
    return found.reason, output


def test_a_second_start_of_the_same_within_a_day_does_not_probe(reader, clock) -> None:
    reason, output = start(reader)
    assert output == ["probing exactness"] and reason == "rows are bit-equal in any batch (probed)"
    clock[0] += DAY - 1
    reason, output = start(reader)
    assert output == [] and reason.endswith("(probed at an earlier start, 2027-01-15 08:00 UTC)")
    assert start(reader, "others")[1] == ["probing exactness"]
    clock[0] += 2
    assert start(reader)[1] == ["probing exactness"]


def test_an_engine_says_that_it_was_probed_before() -> None:
    output: list[str] = []
    config = EngineConfig(draft="none", max_model_len=64, kv_tokens=512, threads=1)
    for _ in range(2):
        info = build_engine(config, lambda phase, share=None: output.append(phase), cached=True).info
    assert output.count("probing exactness") == 1 and "at an earlier start" in info.exact_reason and info.exact


def test_what_is_not_exact_is_never_kept(reader, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        mutations.values_by_slot(patch)
        assert not exactness_of("these", reader.model, reader.pool, lambda phase: None).exact
    assert start(reader)[1] == ["probing exactness"]


@pytest.mark.parametrize("content", [b"", b"never", b"[NaN,true]", b"[1e99,true]", b"[true]", b"[1,null]"])
def test_a_finding_that_cannot_be_read_is_none(reader, content, monkeypatch) -> None:
    start(reader)
    monkeypatch.setattr(kernel_cache, "load", lambda key: content)
    assert start(reader)[1] == ["probing exactness"]
