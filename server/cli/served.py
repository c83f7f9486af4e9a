"""A model of a running server in place of an engine of one's own: what ``foresay chat`` reads of either."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import UNSET

from foresay.server.catalog.hub import is_local
from foresay.server.cli.progress import note
from foresay.server.cli.serve import URL, ServerGone, answer, answers
from foresay.server.engine_process.text_stream import AnswerStream, Completion
from foresay.server.schemas.chat import Provenance, StepProvenance
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.fields import settings_of
from foresay.server.settings.resolved import cached_target
from foresay.server.text.tokenizer import SamplingDefaults
from foresay.spec.errors import ConfigurationError, ForesayError, InvalidRequest
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics

#: Seconds in which a server that answers sends something: a stream that waits has comments.
SILENT_SECONDS = 120.0


class ServedModel:
    """One model of a server. card: its entry of ``/v1/models``. info: what a conversation reads of an engine's, of a
    model that was never loaded only the name. usual: how tokens are sampled for people."""

    def __init__(self, url: str, key: str | None, card: Mapping[str, Any]) -> None:
        self._url, self._key, self._name = url, key, card["id"]
        server = answer(url, "/server_info", key, SILENT_SECONDS)
        engine = server.get("models", {self._name: server["engine"]}).get(self._name) or {}
        known = {name: engine.get(name, "") for name in ("drafter", "exact_reason")}
        self.info = SimpleNamespace(target=f"{self._name} at {url}", **known)
        self.usual = msgspec.convert(card.get("sampling", {}), SamplingDefaults).for_people()

    def stream_chat(
        self,
        messages: list[dict[str, str]],
        params: SamplingParams,
        *,
        stop: Sequence[str],
        speculate: bool,
        **more: bool,
    ) -> ServedStream:
        """As :meth:`foresay.server.engine_process.local.Engine.stream_chat`, with provenance: it counts the passes."""
        given = {name: value for name, value in msgspec.to_builtins(params).items() if value not in (None, (), [], {})}
        asked = {"model": self._name, "messages": messages, "stop": stop, "speculation": {"off": not speculate}}
        shape = {"stream": True, "stream_options": {"include_usage": True}, "provenance": True}
        return ServedStream(self._url, self._key, given | asked | shape)


class ServedStream(AnswerStream):
    """An answer of a server, event by event."""

    def __init__(self, url: str, key: str | None, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._text, self._thinks = url, "", False
        self._ending: dict[str, Any] = {}  # the last choice
        self._response: Any = None  # until its headers are there
        self._events = answers(url, "/v1/chat/completions", key, body, SILENT_SECONDS, self._begin)

    def _begin(self, response: Any) -> None:
        self._response = response
        if self._unwanted:
            self.close_soon()

    def close(self) -> None:
        """Close the connection, which cancels the request; what was written so far becomes the completion."""
        self._events.close()
        self.completion = self.completion or self._completed(False, None)

    def close_soon(self) -> None:
        super().close_soon()
        if self._response is not None and not self._response.isclosed():
            with suppress(OSError), socket.socket(fileno=os.dup(self._response.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # ends a read that waits

    def _step(self) -> None:
        event = None
        with suppress(ForesayError):
            event = next(self._events, None)
        if event is not None:
            self._take(event)
        elif not self._unwanted:
            when = "went away in the middle of the answer" if self._response is not None else "is gone"
            raise ServerGone(f"{self._url}: the server {when}")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            message, wrong = event["error"]["message"], event["error"]["type"] == "invalid_request_error"
            raise InvalidRequest("", message) if wrong else ForesayError(f"{self._url}: {message}")
        for choice in event["choices"]:
            self._ending = choice
            self._note(choice.get("provenance", {"steps": [], "tokens": []}))
            if text := self._spelled(choice["delta"]):
                self._text += text
                self._pieces.append(text)
        if event.get("usage"):
            statistics = _statistics(self.steps, event["usage"], event["metrics"])
            self.completion = self._completed(event["metrics"]["exact"], statistics)

    def _note(self, given: dict[str, Any]) -> None:
        provenance = msgspec.convert(given, Provenance)
        for token in provenance.tokens:
            if token.reasoning is not UNSET:
                token.text = token.reasoning + token.text
        self.steps += provenance.steps
        self.tokens += provenance.tokens

    def _spelled(self, delta: dict[str, Any]) -> str:
        """The text, reasoning in the usual tags, as models write it."""
        thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
        begins, ends = thought and not self._thinks, text and self._thinks
        self._thinks = bool(thought) or (self._thinks and not text)
        return f"<think>{thought}" if begins else f"</think>{text}" if ends else thought + text

    def _completed(self, exact: bool, statistics: Statistics | None) -> Completion:
        return Completion(
            text=self._text,
            token_ids=[token.id for token in self.tokens],
            prompt_token_ids=[],
            finish_reason=self._ending.get("finish_reason") or "cancelled",
            seed=self._ending.get("seed", 0),
            exact=exact,
            statistics=statistics,
        )


def _statistics(steps: Sequence[StepProvenance], usage: dict[str, Any], metrics: dict[str, Any]) -> Statistics:
    """The engine's statistics, as far as a conversation reads them."""
    first, accepted = metrics["time_to_first_token_ms"] / 1000, [step.accepted for step in steps]
    return Statistics(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        first=first,
        last=first + metrics["generation_time_ms"] / 1000,
        first_tokens=accepted[0] + 1 if accepted else 0,
        accepted_per_depth=[sum(count > depth for count in accepted) for depth in range(max(accepted, default=0))],
        per_step_drafted=[step.drafted for step in steps],
        per_step_accepted=accepted,
    )


# -- which one ---------------------------------------------------------------------------------------------------------


def served_model(config: SamplingConfig, arguments: Namespace) -> ServedModel | None:
    """The model of ``--url``, or of a server at the default address that has this very target, if no other engine is
    asked for; None if there is none. A key is sent only to a server that is named."""
    known = [one for one in settings_of(SamplingConfig).values() if one.group not in ("sampling", "stopping")]
    given = [one.flag for one in known if one.name in arguments and one.name != "target"]
    if arguments.url is None and arguments.api_key is not None:
        raise ConfigurationError("--api-key is for a server: give its --url too")
    if arguments.url is None:
        variables = [one.variable for one in known if one.name != "target" and os.environ.get(one.variable)]
        own = given or variables or arguments.config or os.environ.get("FORESAY_CONFIG") or arguments.no_server
        return None if own else _found(config)
    if given:
        raise ConfigurationError(f"{given[0]} is for an engine of one's own: leave it out, or --url")
    return _named(config, arguments)


def _named(config: SamplingConfig, arguments: Namespace) -> ServedModel:
    url, key = arguments.url, arguments.api_key or os.environ.get("FORESAY_API_KEY")
    listed = answer(url, "/v1/models", key, SILENT_SECONDS).get("data", [])
    cards = [card for card in listed if card.get("owned_by") == "foresay"]
    if not cards:
        raise ForesayError(f"--url {url}: this is not a Foresay server")
    for card in cards:
        if "target" not in arguments or config.target == card["id"] or _is_same(config, card["root"]):
            return ServedModel(url, key, card)
    raise ConfigurationError(f"TARGET {config.target}: {url} serves {', '.join(card['id'] for card in cards)}")


def _found(config: SamplingConfig) -> ServedModel | None:
    """No key is sent, since anything may listen there."""
    with suppress(ForesayError, AttributeError, KeyError, TypeError):  # nothing listens there, or another program
        cards = next(answers(URL, "/v1/models", None, seconds=0.5), {}).get("data", [])
        for card in (one for one in cards if one["owned_by"] == "foresay"):
            model = ServedModel(URL, None, card) if _is_same(config, card["root"]) else None
            if model is not None and model.info.drafter:  # its engine was ready
                note(f"the server at {URL} has this model, so it answers; --no-server loads it here")
                return model
    return None


def _is_same(config: SamplingConfig, root: str) -> bool:
    """Whether a server's target is the config's. A relative path is not: it is relative to where the server began."""
    if not Path(root).is_absolute() and (is_local(root) or Path(root).exists()):
        return False
    ours, theirs = (cached_target(msgspec.structs.replace(config, target=name)) for name in (config.target, root))
    return config.target == root or (ours is not None and theirs is not None and ours.resolve() == theirs.resolve())
