"""Generated requests, right and wrong ones, for every route: no 5xx, no hang, and every 4xx names the field."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from foresay.server.api.common.route import Route
from foresay.server.http.app import ROUTE_MODULES
from foresay.server.http.openapi import document
from foresay.server.schemas.shared import NOT_DONE
from tests.routes.running import scripted_server
from tests.server.live import LiveServer
from tests.server.scripted import END

LIVE_CASES = 150
SECONDS = 60.0
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


TURNS = [{"role": "user", "content": "Once"}]
#: What most cases would stumble over, made good: the options behind it are reached then.
GOOD: dict[str, Any] = {
    "messages": TURNS,
    "input": "Once",
    "prompt": "Once",
    "max_tokens": 8,
    "tools": None,
    "response_format": None,
}


def schema_for(model: str, **given: Any) -> Any:
    """The document, in which the model's name is known, and the values of these fields."""
    described = document(ROUTE_MODULES)
    known = {"model": model} | given
    for schema in described["components"]["schemas"].values():
        if schema["title"].endswith("Request"):
            fields = schema["properties"]
            served = {name for name, field in fields.items() if field.get("description") != NOT_DONE}
            found = {name: {"enum": [value]} for name, value in known.items() if name in served}
            if "messages" in found:  # a request has those or a prompt
                found.pop("prompt", None)
            fields |= found
            schema["required"] = sorted({*schema.get("required", ()), *found})
    for parameter in described["paths"]["/v1/models/{name}"]["get"]["parameters"]:
        parameter["schema"]["enum"] = [model, "another", "a/b\nc"]
    return schemathesis.openapi.from_dict(described)


def cases_of(model: str) -> list[st.SearchStrategy[Any]]:
    """Of every operation: right cases, and wrong ones where there is a body to get wrong."""
    kinds: list[st.SearchStrategy[Any]] = []
    for known in ({}, GOOD, GOOD | {"stream": True}):
        schema = schema_for(model, **known)
        for found in schema.get_all_operations():
            operation = found.ok()
            kinds.append(operation.as_strategy())
            if operation.body:
                kinds += [operation.as_strategy()] * 2
                kinds.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    return kinds


def run(model: str, count: int, judge: Callable[[Any], None]) -> None:
    """Judge about ``count`` cases, the same ones each time, as many of each kind."""
    kinds = cases_of(model)
    how = settings(
        max_examples=-(-count // len(kinds)),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for kind in kinds:
        how(given(case=kind)(judge_of(judge)))()


def judge_of(judge: Callable[[Any], None]) -> Callable[..., None]:
    """A function of its own for each kind, as hypothesis wants it."""

    def each(case: Any) -> None:
        judge(case)

    return each


FIELDS: dict[str, set[str]] = {
    route.path: set(route.body.__struct_fields__)
    for module in ROUTE_MODULES
    for route in module.ROUTES
    if isinstance(route, Route) and route.body is not None
}


def names_the_field(path: str, body: Any, requested: str = "") -> bool:
    """Whether an error says what it is about: a field of the body, the body, or the path. requested: what stood there
    for the path's names.

    Ollama's errors are a sentence and nothing else; the field is in it.
    """
    error = body["error"]
    if isinstance(error, str):
        return any(word in error for word in ("body", path, *FIELDS.get(path, ())))
    return bool(error.get("param")) or any(each in error["message"] for each in ("body", path, requested or path))


class Judge:
    """Sends a case and looks at the answer; counts what came back."""

    def __init__(self, url: str) -> None:
        self.seen: collections.Counter[tuple[str, int]] = collections.Counter()
        self._url, self._session = url, requests.Session()

    def __call__(self, case: Any) -> None:
        response = case.call(base_url=self._url, session=self._session, timeout=SECONDS)
        self.seen[case.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if 400 <= response.status_code < 500:
            requested = unquote(urlsplit(response.request.url).path)
            assert names_the_field(case.path, response.json(), requested), response.text

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    @property
    def served(self) -> set[str]:
        """Paths that answered a request."""
        return {path for path, status in self.seen if status == 200}


@pytest.fixture
def judged() -> Iterator[Callable[[str], Judge]]:
    judges: list[Judge] = []

    def judge(url: str) -> Judge:
        judges.append(Judge(url))
        return judges[-1]

    yield judge
    for one in judges:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [600, pytest.param(2000, marks=pytest.mark.soak)])
def test_generated_requests(agent, judged, count) -> None:
    with scripted_server(agent, [*agent.encode("Once upon a fox 🦊 there was"), END]) as url:
        judge = judged(url)
        run("toy", count, judge)
    assert judge.seen.total() >= count / 2, "some kinds have few cases"
    paths = set(document(ROUTE_MODULES)["paths"])
    assert {path for path, _ in judge.seen} == paths
    # What is asked for is not there, or needs an admin key or tokens for infilling, which this server does not have.
    others = ("{response_id}", "{request_id}", "/admin/", "/infill")
    assert judge.served == {path for path in paths if not any(other in path for other in others)}


@pytest.mark.slow
def test_the_real_engine_stays_up(tmp_path, judged) -> None:
    flags = ("--max-model-len", "64", "--max-seqs", "4", "--served-model-name", "toy")
    with LiveServer(tmp_path / "log", *flags) as server:
        url = server.wait_for_url()
        judge = judged(url)
        run("toy", LIVE_CASES, judge)
        requests.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=SECONDS
        ).raise_for_status()
        health = requests.get(f"{url}/health", timeout=SECONDS).json()
        metrics = requests.get(f"{url}/metrics", timeout=SECONDS).text
    assert (health["status"], health["running"]) == ("ok", 0)
    # A keep_alive of 0 unloads the model, so the engine may have been started several times; it may not have died.
    restarts = [line for line in metrics.splitlines() if line.startswith("foresay:engine_restarts_total{")]
    assert restarts and all(line.endswith(" 0.0") for line in restarts)
    assert "failed" not in server.output
