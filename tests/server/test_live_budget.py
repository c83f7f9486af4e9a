"""A server that chooses who drafts: the same text with any drafter, and what it reports of its choices."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import LiveServer

ASK = {"model": "bundled", "prompt": "Once upon a time there was", "max_tokens": 40, "temperature": 1, "seed": 4}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with LiveServer(log, "--draft", "auto", "--max-model-len", "256") as server:
        yield server.wait_for_url()


def fetched(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    requested = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(requested, timeout=120) as response:
        text = response.read().decode()
    return json.loads(text) if text.startswith("{") else text


def said(url: str, **speculation: object) -> dict[str, Any]:
    body = ASK | {"speculation": speculation, "spec_decode_metrics": "detailed", "provenance": True}
    answer: dict[str, Any] = fetched(f"{url}/v1/completions", body)
    return answer


def test_the_text_is_the_same_with_any_drafter(url: str) -> None:
    plain = said(url, off=True)
    text = plain["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    for requested in ({}, {"method": "draft_model"}, {"method": "suffix"}, {"method": "suffix", "max_tokens": 2}):
        answer = said(url, **requested)
        assert answer["choices"][0]["text"] == text, requested
        drafters = {step["drafter"] for step in answer["choices"][0]["provenance"]["steps"] if step["drafted"]}
        assert drafters <= ({requested["method"]} if requested else drafters)


def test_no_draft_is_deeper_than_requested(url: str) -> None:
    for most in (1, 2):
        reported = said(url, method="draft_model", max_tokens=most)
        assert all(token["depth"] <= most for token in reported["choices"][0]["provenance"]["tokens"])


def test_choices_are_counted(url: str) -> None:
    said(url)
    counted = [line for line in fetched(f"{url}/metrics").splitlines() if "spec_decode_num_choices_total{" in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) > 3
