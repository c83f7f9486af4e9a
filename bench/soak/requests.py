"""The soak's requests, for every API, drawn from a seed, most of them right and some wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bench import prompts
from bench.schemas import Schemas

Json = dict[str, Any]
Conduct = Literal["reads", "slow", "leaves", "cancels"]

#: The path of each API. ``socket`` is the same API over a WebSocket.
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "socket": "/v1/responses",
    "messages": "/v1/messages",
    "ollama chat": "/api/chat",
    "ollama generate": "/api/generate",
}
SHARES = {
    "completions": 6,
    "chat": 4,
    "responses": 3,
    "socket": 5,
    "messages": 2,
    "ollama chat": 2,
    "ollama generate": 2,
}
CONDUCTS: dict[Conduct, int] = {"reads": 70, "slow": 7, "leaves": 14, "cancels": 9}
#: Fields that change how an answer is generated or sent, but not its content.
MANNERS = ("prediction", "speculation", "stream", "stream_options", "provenance")
STOPS = (" the", ".", "\n", " and", "he ", "ing", "?", "s")
JUNK: tuple[Any, ...] = (-1, 0, 1e9, "", "x", [], {}, True, [7], ["é"] * 3, {"type": "x"}, 2**63, 2**70, [[]], -0.5)
GRAMMARS = ('start: "no" | "yes" start', r"start: /[a-z]{2,9}/ (" r'" " /[a-z]{2,9}/)*', 'start: "[" (start)* "]"')
REGEXES = (r"[a-z]{3,12}( [a-z]{2,9}){0,6}\.", r"\d{1,3}(,\d{3}){0,3}", "(yes|no|perhaps), [A-Z][a-z]+", "(ab|a|b)*!")


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request. bodies: one for each turn of a conversation, mostly one. after: events received before leaving or
    cancelling. wrong: most likely refused."""

    api: str
    bodies: tuple[Json, ...]
    stream: bool
    conduct: Conduct = "reads"
    after: int = 0
    wrong: bool = False

    @property
    def plain(self) -> tuple[Json, ...]:
        """The requests to plain decoding: the same, not streamed, and with nothing that speculation could use."""
        if self.wrong:
            return self.bodies
        return tuple({k: v for k, v in b.items() if k not in MANNERS} | {"stream": False} for b in self.bodies)


class RequestSource:
    """Draws requests; the same ones for the same seed. vocab: ids below it are tokens. room: the model's context."""

    def __init__(self, seed: str, model: str, vocab: int, room: int) -> None:
        self._random = random.Random(seed)
        self._schemas = Schemas(self._random.randrange(1 << 30), depth=2, room=16)
        self._model, self._vocab, self._room = model, vocab, room
        self._words = [prompt.text.split() for prompt in prompts.load()]
        self._prompts: list[str] = []
        self._sent: list[SoakRequest] = []

    def visit(self) -> list[SoakRequest]:
        """What a client sends next: one request, or several at once over one socket."""
        if self._sent and self._chance(0.1):
            return [self._random.choice(self._sent)]
        (api,) = self._random.choices(list(SHARES), list(SHARES.values()))
        count = self._random.randint(1, 4) if api == "socket" else 1
        visit = [self._request(api) for _ in range(count)]
        self._sent += visit
        return visit

    def _request(self, api: str) -> SoakRequest:
        body = self._body(api)
        wrong = self._chance(0.12)
        if wrong:
            self._spoil(body)
        stream = api == "socket" or self._chance(0.65)
        if api != "socket":
            body["stream"] = stream
        if stream and not wrong and api in ("completions", "chat"):
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": self._chance(0.3)}
        (conduct,) = self._random.choices(list(CONDUCTS), list(CONDUCTS.values()))
        bodies: tuple[Json, ...] = (body,)
        if api in ("responses", "socket") and not wrong and conduct == "reads" and self._chance(0.3):
            body["store"] = True
            bodies = (body, self._body(api) | {"store": True, "stream": stream})
        return SoakRequest(api, bodies, stream, conduct, self._random.randint(0, 12), wrong)

    def _body(self, api: str) -> Json:
        make: dict[str, Callable[[], Json]] = {
            "completions": self._completion,
            "chat": self._chat,
            "messages": self._messages,
            "ollama chat": self._ollama_chat,
            "ollama generate": self._ollama_generate,
        }
        body = {"model": self._model} | make.get(api, self._response)()
        return self._long(body) if "ignore_eos" in body else body

    def _long(self, body: Json) -> Json:
        """Make it so long that several at once do not fit into the pages, and some are preempted."""
        most = {name: self._room // 2 for name in ("max_tokens", "max_output_tokens") if name in body}
        return {name: value for name, value in body.items() if name not in ("stop", "stop_token_ids")} | most

    # -- the APIs ------------------------------------------------------------------------------------------------

    def _completion(self) -> Json:
        body = self._shared() | {"prompt": self._prompt(), "max_tokens": self._length()}
        if self._chance(0.15):
            body["prompt"] = [self._random.randrange(5, self._vocab) for _ in range(self._random.randint(1, 120))]
        elif self._chance(0.1):
            body["prompt"] = [self._prompt() for _ in range(self._random.randint(1, 3))]
            body.pop("prediction", None)  # is of one answer
        return body | self._some(
            n=lambda: self._random.randint(1, 4),
            echo=lambda: True,
            logprobs=lambda: self._random.randint(0, 4),
            prompt_logprobs=lambda: self._random.randint(0, 2),
            return_token_ids=lambda: True,
        )

    def _chat(self) -> Json:
        body = self._shared() | {"messages": self._turns()}
        if not self._chance(0.03):
            body["max_tokens"] = self._length()
        if self._chance(0.2):
            body |= {"logprobs": True, "top_logprobs": self._random.randint(0, 3)}
        return body | self._some(
            n=lambda: self._random.randint(1, 4),
            prompt_logprobs=lambda: self._random.randint(0, 2),
            return_token_ids=lambda: True,
            return_tokens_as_token_ids=lambda: True,
        )

    def _response(self) -> Json:
        body = self._shared() | {"input": self._prompt(), "max_output_tokens": self._length()}
        shape = body.pop("response_format", None)
        if shape is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "it", "schema": self._schemas.next()}}
        if self._chance(0.2):
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": self._random.randint(0, 3)}
        return body | self._some(
            instructions=lambda: "Be brief.", store=lambda: self._chance(0.5), truncation=lambda: "auto"
        )

    def _messages(self) -> Json:
        return {"messages": self._turns(), "max_tokens": self._length()} | self._some(
            temperature=lambda: self._random.choice([0, 0.7, 1]),
            top_p=lambda: self._random.choice([0.5, 0.95]),
            top_k=lambda: self._random.choice([1, 5, 40]),
            stop_sequences=self._stops,
            system=lambda: "You tell stories.",
            output_config=lambda: {"format": {"type": "json_schema", "schema": self._schemas.next()}},
        )

    def _ollama_chat(self) -> Json:
        return {"messages": self._turns()} | self._ollama()

    def _ollama_generate(self) -> Json:
        return {"prompt": self._prompt(), "raw": self._chance(0.4)} | self._ollama()

    def _ollama(self) -> Json:
        options = {"num_predict": self._length()} | self._some(
            temperature=lambda: self._random.choice([0, 0.7, 1, 1.5]),
            seed=lambda: self._random.randrange(1 << 20),
            top_k=lambda: self._random.choice([1, 5, 40]),
            top_p=lambda: self._random.choice([0.5, 0.95]),
            min_p=lambda: 0.05,
            stop=self._stops,
            repeat_penalty=lambda: 1.2,
            frequency_penalty=lambda: 0.5,
        )
        some = self._some(logprobs=lambda: True, format=lambda: self._random.choice(["json", self._schemas.next()]))
        return {"options": options} | some

    # -- common fields -------------------------------------------------------------------------------------------

    def _shared(self) -> Json:
        body: Json = {"temperature": self._random.choice([0, 0, 0.7, 1, 1, 1.5])}
        if self._chance(0.7):
            body["seed"] = self._random.randrange(1 << 20)
        if self._chance(0.12):
            body |= self._shape()
        return body | self._some(
            top_k=lambda: self._random.choice([1, 5, 40]),
            top_p=lambda: self._random.choice([0.3, 0.9, 0.99]),
            min_p=lambda: self._random.choice([0.02, 0.2]),
            presence_penalty=lambda: self._random.choice([-0.5, 1.0]),
            frequency_penalty=lambda: self._random.choice([-0.3, 0.8]),
            repetition_penalty=lambda: self._random.choice([0.9, 1.3]),
            logit_bias=lambda: {str(self._token()): self._random.choice([-100, -2, 3, 9]) for _ in range(3)},
            bad_words=lambda: self._random.sample(["the", "he", "was", "money", "a little"], 2),
            allowed_token_ids=lambda: sorted({self._token() for _ in range(60)}),
            stop=self._stops,
            stop_token_ids=lambda: [self._token() for _ in range(20)],
            include_stop_str_in_output=lambda: True,
            min_tokens=lambda: self._random.randint(1, 12),
            ignore_eos=lambda: True,
            skip_special_tokens=lambda: False,
            truncate_prompt_tokens=lambda: self._random.randint(1, 60),
            cache_salt=lambda: self._random.choice("ab"),
            provenance=lambda: True,
            speculation=lambda: {"max_tokens": self._random.randint(1, 5)},
            prediction=lambda: {"type": "content", "content": self._text()[:400]},
        )

    def _shape(self) -> Json:
        """A grammar of some kind."""
        structured: list[Json] = [
            {"regex": self._random.choice(REGEXES)},
            {"choice": ["yes", "no", "no one knows"]},
            {"grammar": self._random.choice(GRAMMARS)},
            {"json": self._schemas.next()},
        ]
        schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": self._schemas.next()}}
        formats: list[Json] = [{"response_format": schema}, {"response_format": {"type": "json_object"}}]
        return self._random.choice([*({"structured_outputs": one} for one in structured), *formats])

    def _some(self, **makers: Callable[[], Any]) -> Json:
        """Each field with a chance of one in ten."""
        return {name: make() for name, make in makers.items() if self._chance(0.1)}

    def _spoil(self, body: Json) -> None:
        """Make one field wrong, most likely; how the answer is sent stays the same."""
        field = self._random.choice([name for name in body if name not in MANNERS])
        value = body[field]
        if isinstance(value, dict) and value and self._chance(0.5):
            body[field] = value | {self._random.choice(list(value)): self._random.choice(JUNK)}
        elif field != "max_tokens" or self._chance(0.9):
            body[field] = self._random.choice(JUNK)

    def _prompt(self) -> str:
        """A new text, one sent before, or one sent before with more."""
        kind = self._random.random() if self._prompts else 1.0
        text = self._random.choice(self._prompts) if kind < 0.5 else ""
        if kind > 0.2:
            text = f"{text} {self._text()}".strip()
        if len(text) < 6 * self._room:
            self._prompts.append(text)
        return text

    def _text(self) -> str:
        """Some words of a prompt; rarely more than the model can read."""
        longest = self._random.choice([6, 20, 20, self._room // 4, self._room // 2] + [self._room] * self._chance(0.1))
        words: list[str] = []
        while len(words) < longest:
            words += self._random.choice(self._words)
        return " ".join(words[: self._random.randint(1, longest)])

    def _turns(self) -> list[Json]:
        turns = [{"role": "user", "content": self._prompt()}]
        if self._chance(0.3):
            turns += [{"role": "assistant", "content": self._text()}, {"role": "user", "content": self._text()}]
        return turns

    def _stops(self) -> list[str]:
        return self._random.sample(STOPS, self._random.randint(1, 3))

    def _length(self) -> int:
        return self._random.randint(1, 160 if self._chance(0.15) else 60)

    def _token(self) -> int:
        return self._random.randrange(5, self._vocab)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share
