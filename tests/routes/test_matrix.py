"""Every API by every feature: where each has it, and requests at random, whole and streamed, held to plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from foresay.server.text.options import choice_seed
from foresay.server.text.tokenizer import SamplingDefaults
from foresay.spec.names import PREDICTION
from foresay.spec.request import Origin, Request
from foresay.spec.sampling import SamplingParams
from tests.provenance.drafting import Drafting, Json, check_counts, check_steps, ids_of, joined
from tests.routes.apis import APIS, RAW, SOCKET, Api, at
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END, ScriptedEngine, entry, served

TOKENIZER = byte_level_tokenizer()
STORY = "Once upon a fox there was a 🦊🐍. The fox said: 'naïve tart' and 世界 ended."
STOPS = ["fox", " the", ".", "🐍", "d: 'n", "world", "x t", "世", "ended!"]
MATRIX = APIS | {"ollama raw": RAW, "socket": SOCKET}
TOP = 2


class Cell(NamedTuple):
    """A feature in an API: what a request has besides, by the API's own names, and where the answer has it."""

    where: str
    asks: Json


def each(names: str, where: str, **asks: Any) -> dict[str, Cell]:
    """The same cell for several APIs."""
    return dict.fromkeys(names.split(","), Cell(where, asks))


CHOICES, RESPONSES, OLLAMA = "completions,chat", "responses,socket", "ollama,ollama generate,ollama raw"
PREDICTED: Json = {"prediction": {"type": "content", "content": "Once upon"}}
SCHEMA: Json = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORMAT: Json = {"type": "json_schema", "schema": SCHEMA}
#: By feature and API; an API that has no cell does not have the feature.
CELLS: dict[str, dict[str, Cell]] = {
    "prompt": each(CHOICES, "usage.prompt_tokens") | each(f"messages,{RESPONSES}", "usage.input_tokens")
    | each(OLLAMA, "prompt_eval_count"),
    "cached": each(CHOICES, "usage.prompt_tokens_details.cached_tokens")
    | each("messages", "usage.cache_read_input_tokens") | each(RESPONSES, "usage.input_tokens_details.cached_tokens")
    | each(OLLAMA, "prompt_eval_cached_count"),
    "written": each(CHOICES, "usage.completion_tokens") | each(f"messages,{RESPONSES}", "usage.output_tokens")
    | each(OLLAMA, "eval_count"),
    "metrics": each(f"{CHOICES},{RESPONSES}", "metrics", spec_decode_metrics="detailed") | each("messages", "metrics"),
    "provenance": each(CHOICES, "choices.0.provenance", provenance=True)
    | each(RESPONSES, "provenance", provenance=True),
    "logprobs": each("completions", "choices.0.logprobs.token_logprobs", logprobs=TOP)
    | each("chat", "choices.0.logprobs.content", logprobs=True, top_logprobs=TOP)
    | each(RESPONSES, "output.0.content.0.logprobs", include=["message.output_text.logprobs"], top_logprobs=TOP)
    | each(OLLAMA, "logprobs", logprobs=True, top_logprobs=TOP),
    "ids": each(CHOICES, "choices.0.token_ids", return_token_ids=True),
    "prompt ids": each("completions", "choices.0.prompt_token_ids", return_token_ids=True)
    | each("chat", "prompt_token_ids", return_token_ids=True),
    "stop": each(CHOICES, "choices.0.stop_reason") | each("messages", "stop_sequence"),
    "seed": each(CHOICES, "choices.0.seed") | each(RESPONSES, "seed"),
    "prediction": each(CHOICES, "usage.completion_tokens_details", **PREDICTED)
    | each(RESPONSES, "usage.output_tokens_details", **PREDICTED),
    "grammar": each("completions", "", structured_outputs={"json": SCHEMA})
    | each("chat", "", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
    | each(RESPONSES, "", text={"format": FORMAT | {"name": "a"}})
    | each("messages", "", output_config={"format": FORMAT})
    | each(OLLAMA, "", format=SCHEMA),
}  # fmt: skip


def every(chunks: Sequence[Json], path: str) -> list[Any]:
    """What each chunk has there, if it has anything."""
    holders = [one for chunk in chunks for one in (chunk, *map(chunk.get, ("response", "message", "delta"))) if one]
    return [found for one in holders if (found := at(one, path)) not in (..., None)]


class Anything(Drafting):
    """Each seed has its own words. predicting: what is drafted is called the prediction's."""

    predicting = False

    def script_of(self, request: Request) -> Sequence[int]:
        return words(self.tokens, request.params.seed or 0)

    def origin(self, emitted: int, run: list[int]) -> Origin:
        made = super().origin(emitted, run)
        drafted = len(made.parents) - 1 - made.forced
        if not (self.predicting and made.drafter):
            return made
        return msgspec.structs.replace(made, drafter=PREDICTION, predicted=drafted)


def words(tokens: Sequence[int], seed: int) -> list[int]:
    begin = seed % len(tokens)
    return [*tokens[begin:], *tokens[:begin]]


class Plain(NamedTuple):
    """What plain decoding writes."""

    text: str
    tokens: list[int]
    finish: str
    stop: str | None = None


def plain(tokens: Sequence[int], stops: Sequence[str], most: int, include: bool) -> Plain:
    """Token by token, to the first end."""
    for count in range(1, most + 1):
        text = TOKENIZER.decode(tokens[:count])
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            end, size, stop = min(found)
            return Plain(text[: end if include else end + size], list(tokens[:count]), "stop", stop)
        if tokens[count - 1] == END:
            return Plain(text, list(tokens[:count]), "stop")
    return Plain(TOKENIZER.decode(tokens[:most]), list(tokens[:most]), "length")


#: What is asked of any API, by the names of OpenAI's chats. n: where there are choices. seed: where there is one.
requests = some.fixed_dictionaries(
    {
        "max_tokens": some.integers(1, 70),
        "stop": some.lists(some.sampled_from(STOPS), max_size=3, unique=True),
        "seed": some.integers(1, 1000),
        "n": some.integers(1, 4),
        "include_stop_str_in_output": some.booleans(),
    }
)
ONCE: Json = {"max_tokens": 3, "stop": ["fox"], "seed": 77, "n": 1, "include_stop_str_in_output": False}


def possible(name: str, fields: Json) -> Json:
    """Of the fields those that the API has."""
    choices = name in CHOICES.split(",")
    return {
        field: value
        for field, value in fields.items()
        if (field != "seed" or name != "messages") and (choices or field not in ("n", "include_stop_str_in_output"))
    }


@settings(max_examples=250)
@given(
    name=some.sampled_from([*MATRIX]),
    stream=some.booleans(),
    fields=requests,
    features=some.sets(some.sampled_from([*CELLS])),
    longest=some.integers(2, 9),
)
@example(name="socket", stream=True, fields=ONCE, features={"provenance"}, longest=9)
async def test_any_request(name: str, stream: bool, fields: Json, features: set[str], longest: int) -> None:
    api, cells = MATRIX[name], {one: CELLS[one][name] for one in features if name in CELLS[one]}
    engine = Anything(ids_of(STORY, TOKENIZER), fields["seed"], longest)
    engine.predicting = "prediction" in cells
    fields = possible(name, fields)
    body = api.request(stream, **fields)
    for cell in cells.values():
        body |= cell.asks
    async with served(engine, TOKENIZER) as client:
        chunks = await api.exchange(client, body)
    seeds = [choice_seed(fields.get("seed", 0), number) for number in range(fields.get("n", 1))]
    include = fields.get("include_stop_str_in_output", False)
    truths = [plain(words(engine.tokens, seed), fields["stop"], fields["max_tokens"], include) for seed in seeds]
    for index, truth in enumerate(truths):
        own = [
            chunk | {"choices": [one for one in chunk["choices"] if one["index"] == index]}
            if "choices" in chunk
            else chunk
            for chunk in chunks
        ]
        answer = api.joined(own)
        assert (answer.text, answer.finish) == (truth.text, truth.finish)
        for chunk in own if "provenance" in cells else ():
            told = [] if "response" in chunk else every([chunk], cells["provenance"].where)
            assert not told or api.joined([chunk]).text == "".join(token["text"] for token in told[0]["tokens"])
        for feature in features & cells.keys() & OF_CHOICES.keys():
            OF_CHOICES[feature](every(own, cells[feature].where), truth, seeds[index])
    request = engine.requests[0]
    counts: Json = {
        "prompt ids": request.prompt,
        "prompt": len(request.prompt) - (3 if name == "messages" else 0),
        "cached": 3,
        "written": sum(len(truth.tokens) for truth in truths),
    }
    for feature in counts.keys() & cells.keys():
        assert every(chunks, cells[feature].where)[-1] == counts[feature], feature
    for asked, wanted in (("prediction", request.prediction), ("grammar", request.grammar)):
        assert (wanted is not None) == (asked in cells)
    assert ("accepted_prediction_tokens" in str(chunks)) == ("prediction" in cells)
    if {"metrics", "provenance"} <= cells.keys():
        agree(name, chunks, cells, len(truths))


def ends_with(found: list[Any], wanted: Any) -> None:
    assert (found or [None])[-1] == wanted


def numbers(entries: list[Any]) -> list[float]:
    """The log-probabilities of all parts."""
    flat = [one for part in entries for one in part]
    assert all(isinstance(one, float) or len(one["top_logprobs"]) == TOP for one in flat)
    return [one if isinstance(one, float) else one["logprob"] for one in flat]


def scored(found: list[Any], truth: Plain, seed: int) -> None:
    """Whole, or all parts of a stream that has no whole."""
    wanted = [entry(token, place, TOP).logprob for place, token in enumerate(truth.tokens)]
    assert wanted in (numbers(found), numbers(found[-1:]))


def traced(found: list[Any], truth: Plain, seed: int) -> None:
    """Deltas hold together what the whole has, where there is one."""
    record = joined(found)
    if len(record["tokens"]) > len(truth.tokens):
        record, deltas = found[-1], joined(found[:-1])
        assert deltas == record
    check_steps(record)
    assert [token["id"] for token in record["tokens"]] == truth.tokens
    assert "".join(token["text"] for token in record["tokens"]) == truth.text


#: What holds of a choice.
OF_CHOICES: dict[str, Callable[[list[Any], Plain, int], None]] = {
    "logprobs": scored,
    "provenance": traced,
    "ids": lambda found, truth, seed: ends_with([[id for part in found for id in part]], truth.tokens),
    "stop": lambda found, truth, seed: ends_with(found, truth.stop),
    "seed": lambda found, truth, seed: ends_with(found, seed),
}


def agree(name: str, chunks: Sequence[Json], cells: dict[str, Cell], count: int) -> None:
    """The metrics, the provenance and what is said of a prediction count the same tokens."""
    if name in RESPONSES.split(","):
        records = every(chunks, "provenance")[-1:]
    else:
        choices = [one for chunk in chunks for one in chunk["choices"] if "provenance" in one]
        records = [joined([one["provenance"] for one in choices if one["index"] == index]) for index in range(count)]
    check_counts(records, every(chunks, "metrics")[-1])
    if "prediction" in cells:
        details = every(chunks, cells["prediction"].where)[-1]
        accepted = sum(token.get("drafter") == PREDICTION for one in records for token in one["tokens"])
        written = {
            token["step"] for one in records for token in one["tokens"]
        }  # what came after the text is not counted
        steps = [step for one in records for step in one["steps"] if step["drafter"] and step["step"] in written]
        drafted = sum(step["drafted"] - step["forced"] for step in steps)
        assert details["accepted_prediction_tokens"] == accepted
        assert details["rejected_prediction_tokens"] == drafted - accepted


# -- options of sampling -----------------------------------------------------------------------------------------------

MESSAGES: Json = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
LLAMA: Json = MESSAGES | {
    "min_p": 0.1, "seed": -1, "presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.25,
}  # fmt: skip
ALL: Json = LLAMA | {
    "logit_bias": {"17": -100, "3": 2.5}, "allowed_token_ids": [5, 3, 5], "min_tokens": 2, "stop_token_ids": [3, 4],
    "ignore_eos": True,
}  # fmt: skip
#: What each takes; where an engine's word for it is another.
OPTIONS = dict.fromkeys(MATRIX, ALL) | {"messages": MESSAGES, **dict.fromkeys(OLLAMA.split(","), LLAMA)}
READ: Json = {
    "seed": 2**64 - 1, "logit_bias": {17: -100.0, 3: 2.5}, "allowed_token_ids": (5, 3, 5), "stop_token_ids": (3, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", MATRIX)
async def test_every_option_reaches_the_engine(name: str) -> None:
    """The request's, else the model's recommendation, else OpenAI's default."""
    api, options = MATRIX[name], OPTIONS[name]
    engine = ScriptedEngine([END])
    recommended: Json = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.2, "repetition_penalty": 1.1}
    async with served(engine, TOKENIZER) as client:
        await api.answer(client, max_tokens=9, **options)
        await api.answer(client, max_tokens=9)
    async with served(engine, TOKENIZER, defaults=SamplingDefaults(**recommended), seed=11) as client:
        await api.answer(client, max_tokens=9)
        await api.answer(client, max_tokens=9, **options)
    own: Json = options | {k: v for k, v in READ.items() if k in options}
    given: Json = {"seed": 11} | recommended | own
    taken = [request.params for request in engine.requests]
    assert taken[0] == SamplingParams(max_tokens=9, **own)
    assert taken[1:3] == [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, seed=11, **recommended)]
    assert taken[3] == SamplingParams(max_tokens=9, **given)


@pytest.mark.parametrize("name", MATRIX)
async def test_one_grammar_is_asked_for_in_many_ways(name: str) -> None:
    engine = ScriptedEngine([END])
    async with served(engine, TOKENIZER) as client:
        for one in ("chat", name):
            api: Api = MATRIX[one]
            await api.exchange(client, api.request(False) | CELLS["grammar"][one].asks)
    first, second = (request.grammar for request in engine.requests)
    assert first is not None and second is not None and first.text == second.text
