"""A drafter has one name, wherever a server tells it; several in one tree have one too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import aiohttp
import pytest

from foresay.server.api.common.turns import speculation_params
from foresay.server.engine.drafters.registry import drafts
from foresay.server.schemas.shared import Speculation
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import choose_draft
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DRAFT_MODEL, DRAFTERS, GRAMMAR, NGRAM, NONE, PREDICTION, SUFFIX, canonical, together
from tests.server.live import LiveServer
from tests.server.scripted import INFO
from tests.telemetry.scraping import Scrape, scraped

Json = dict[str, Any]

SAID = "Once upon a time there was a fox who went to the market to buy a hat. "
EXTRA: Json = {"provenance": True, "spec_decode_metrics": "detailed", "max_tokens": 48}
ASKS: list[Json] = [
    {"prompt": SAID * 3, "seed": 1, "ignore_eos": True, "speculation": {"method": "draft_model"}},  # first: it is tried
    *({"prompt": SAID * 3, "seed": seed, "ignore_eos": True} for seed in range(6)),
    {"prompt": SAID * 3, "temperature": 0, "ignore_eos": True, "speculation": {"method": "ngram"}, "max_tokens": 200},
    {"prompt": "Tell me", "seed": 2, "structured_outputs": {"choice": ["once upon a time", "the end of it"]}}
    | {"speculation": {"method": "suffix"}},  # which finds nothing, so what is forced is drafted by the grammar alone
    {"prompt": SAID * 3, "temperature": 0, "ignore_eos": True, "prediction": "what the one above wrote without it"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One that chooses among three drafters."""
    choice = ("--draft", "draft_model,suffix,ngram", "--threads", "1")
    with LiveServer(tmp_path_factory.mktemp("serve") / "log", *choice) as server:
        yield server


class Answers:
    """What a server returned: the answers, its health, its page, its metrics."""

    def __init__(self, bodies: list[Json], health: Json, state: Json, listed: list[Json], scrape: Scrape) -> None:
        self.bodies, self.health, self.state, self.listed, self.scrape = bodies, health, state, listed, scrape

    def steps(self, what: str) -> list[Json]:
        """The provenance of all steps, or of all tokens."""
        choices = chain.from_iterable(body["choices"] for body in self.bodies)
        return [one for choice in choices for one in choice["provenance"][what]]

    def labels(self, name: str) -> set[str]:
        """The values of a label in all metrics."""
        found = (dict(labels).get(name) for series in self.scrape.samples.values() for labels in series)
        return {value for value in found if value is not None}


@pytest.fixture(scope="module")
def answers(server: LiveServer) -> Answers:
    return asyncio.run(_answers(server.wait_for_url()))


async def _answers(url: str) -> Answers:
    async with aiohttp.ClientSession() as session:

        async def page(name: str) -> Any:
            return await (await session.get(f"{url}/dashboard/{name}")).json()

        bodies = []
        for ask in ASKS:
            if "prediction" in ask:  # one that is right is drafted from, whatever steps cost
                ask = ask | {"prediction": {"type": "content", "content": bodies[7]["choices"][0]["text"]}}
            async with session.post(f"{url}/v1/completions", json=EXTRA | ask) as response:
                assert response.status == 200, await response.text()
                bodies.append(await response.json())
        async with asyncio.timeout(60):
            tokens, state = sum(body["usage"]["completion_tokens"] for body in bodies), await page("state")
            while sum(point["tokens"] for point in state["history"]["seconds"]) < tokens:  # the last second goes on
                await asyncio.sleep(0.2)
                state = await page("state")
        health, listed = await (await session.get(f"{url}/health")).json(), await page("requests")
    return Answers(bodies, health, state, listed, await scraped(url))


def one_of_them(name: str) -> bool:
    """Whether it is the name of a drafter, or of several in their order."""
    parts = name.split("+")
    return set(parts) <= set(DRAFTERS) and together(parts) == name


def test_every_name_is_one_of_the_list(answers: Answers, server: LiveServer) -> None:
    snapshot = answers.state["snapshot"]
    steps = {step["drafter"] for step in answers.steps("steps") if step["drafted"]}
    tokens = {token["drafter"] for token in answers.steps("tokens") if "drafter" in token}
    page = {rates["drafter"] for rates in snapshot["drafters_hour"]}
    listed = set(chain.from_iterable(one["drafters"] for one in answers.listed))
    metrics = set(answers.scrape.by("foresay:spec_decode_num_drafts_total", "drafter"))
    chosen = set(answers.scrape.by("foresay:spec_decode_num_choices_total", "choice")) - {NONE}
    assert steps == page == listed == metrics, "trees have the same names everywhere"
    assert {DRAFT_MODEL, NGRAM, GRAMMAR, PREDICTION} <= set("+".join(steps).split("+"))
    for name in steps | tokens | chosen:
        assert one_of_them(name), name
    assert all("+" not in name for name in tokens), "a token is one drafter's"
    assert chosen
    for line in re.findall(r"(?:Drafting with|Nothing is drafted) .*", server.output):
        assert all(one_of_them(name) for name in re.findall(r"(?:Drafting with|drafted by) ([^\s,:]+)", line)), line


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_a_drafter_requested_by_name_drafts(answers: Answers, method: str) -> None:
    (body,) = (
        body for body, ask in zip(answers.bodies, ASKS, strict=True) if ask.get("speculation") == {"method": method}
    )
    steps = [step for choice in body["choices"] for step in choice["provenance"]["steps"]]
    assert {step["drafter"] for step in steps if step["drafted"]} == {method}


def test_drafters_have_the_same_name_everywhere(answers: Answers, server: LiveServer) -> None:
    names = ["draft_model", "suffix", "ngram"]
    listed, placed = ", ".join(names), "draft_model:bundled/draft, suffix, ngram"
    shown = answers.state["snapshot"]["server"]
    assert (shown["drafters"], shown["drafter"], shown["draft"]) == (names, listed, placed)
    assert (answers.health["drafter"], answers.health["draft"]) == (listed, placed)
    (info,) = [dict(labels) for labels in answers.scrape.samples["foresay:build_info"]]
    assert (info["drafter"], info["draft"]) == (listed, placed)
    assert f"drafter   {placed}" in server.output
    assert answers.labels("drafter") - {listed} >= {"draft_model", "ngram"}


def test_names_of_several_are_in_one_order() -> None:
    assert together([DRAFT_MODEL, SUFFIX, "", SUFFIX]) == "suffix+draft_model"
    assert together(["somebody", DRAFT_MODEL, PREDICTION]) == "prediction+draft_model+somebody"
    assert together(["prediction+suffix", DRAFT_MODEL]) == "prediction+suffix+draft_model"
    assert together([]) == ""


@pytest.mark.parametrize("named", ["draft_model", "bundled"])
def test_the_bundled_draft_model_by_its_name_and_as_before(named: str) -> None:
    value = choose_draft(EngineConfig(draft=named)).value
    assert value.startswith("draft_model:")
    assert [found.location for found in drafts(EngineConfig(), value)] == [value.partition(":")[2]]


def test_a_draft_model_of_no_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--draft draft_model:: a directory or hub id must follow"):
        drafts(EngineConfig(), "draft_model:")


def test_requests_may_use_the_name_that_was() -> None:
    assert canonical("draft") == DRAFT_MODEL
    assert speculation_params(Speculation(method="draft"), INFO) == speculation_params(
        Speculation(method="draft_model"), INFO
    )
