"""What streaming and collecting need of an answer, and what the OpenAI shapes share.

An answer owns the choices and turns their pieces into chunks; :mod:`server.api.common.streaming` decides when they are
sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from server.api.common import statistics
from server.api.common.sse import EVENTS, Framing
from server.host.service import Origin
from server.schemas.logprobs import PromptLogprobs
from server.schemas.provenance import Provenance
from server.schemas.shared import ErrorBody, GenerationRequest, Metrics, MetricsLevel, Pacing, RequestWarning, Usage
from server.text import options
from server.text.choice import Choice, Piece
from server.text.logprobs import TokenDecoder
from server.text.warned import resumed, together
from spec.request import TokenLogprobs
from spec.sampling import SamplingParams


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to see beside the text. usage, metrics_level: in whole answers and in final chunks.

    logprobs, prompt_logprobs: how many of the likeliest tokens to list beside each token; None: no entries at all.
    tokens_as_ids: spell the tokens of those entries as ids. stream_interval: fewest tokens of a chunk. pacing: when the
    tokens of a run go out. provenance: where the tokens come from.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    metrics_level: MetricsLevel = "summary"
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    stream_interval: int = 1
    pacing: Pacing = "at_once"
    provenance: bool = False

    @classmethod
    def of(cls, request: GenerationRequest, params: SamplingParams, metrics_level: MetricsLevel) -> AnswerOptions:
        """As the request says; ``metrics_level`` unless it names its own. params: made of it."""
        stream = request.stream_options
        return cls(
            stream=bool(request.stream),
            include_usage=bool(stream and stream.include_usage),
            continuous_usage=bool(stream and stream.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
            metrics_level=request.spec_decode_metrics or metrics_level,
            logprobs=params.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            stream_interval=options.stream_interval(request),
            pacing=request.stream_pacing or "at_once",
            provenance=bool(request.provenance),
        )


class Answer(Protocol):
    """What streaming and collecting need of an answer."""

    choices: Sequence[Choice]
    options: AnswerOptions
    framing: Framing

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        """What is done otherwise than asked, as far as it is known."""
        ...

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The chunks that introduce a choice."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """The chunks of a piece."""
        ...

    def closing(self) -> list[msgspec.Struct]:
        """The chunks after the last choice has finished."""
        ...

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> msgspec.Struct:
        """The answer in one piece, from the pieces of each choice."""
        ...

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The chunk that tells of an error in the middle of the stream; the last one."""
        ...


class BaseAnswer:
    """What both OpenAI shapes share: identity, usage and metrics."""

    prefix = ""
    framing = EVENTS

    def __init__(self, origin: Origin, choices: Sequence[Choice], options: AnswerOptions) -> None:
        self.id = f"{self.prefix}-{origin.id}"
        self.model = origin.model
        self.origin = origin
        self.choices = choices
        self.options = options
        self.created = int(time.time())
        self._token_decoder = TokenDecoder(choices[0].tokenizer, options.tokens_as_ids)
        places = {choice.request.id: place for place, choice in enumerate(choices)}
        self._leaders = [places[choice.request.fork_of or choice.request.id] for choice in choices]
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self._unclosed = len(choices)

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        """What is done otherwise than asked, as far as it is known."""
        return together(
            (*self.origin.warnings, *(one for choice in self.choices for one in choice.warnings), *self._replaced())
        )

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The error as OpenAI sends it."""
        return error

    def _usage(self) -> Usage | UnsetType | None:
        """The ``usage`` of a chunk with choices."""
        if self.options.continuous_usage:
            return statistics.usage(self.choices)
        return None if self.options.include_usage else UNSET

    def _metrics(self) -> Metrics | UnsetType:
        return statistics.metrics(self.choices, self.options.metrics_level, self.origin.exact) or UNSET

    def _warnings(self) -> list[RequestWarning] | UnsetType:
        return list(self.warnings) or UNSET

    def _replaced(self) -> Iterator[RequestWarning]:
        """Where another engine went on, if the text may be another one from there."""
        for index, choice in enumerate(self.choices):
            if (told := choice.statistics) is not None:
                places = told.changed if self.origin.exact else told.resumed
                yield from (resumed(index, at_token) for at_token in places)

    def _closes(self, piece: Piece) -> bool:
        """Whether the chunk of this piece is the answer's last one. To be asked once for each piece, in order."""
        if piece.finish_reason is None:
            return False
        self._unclosed -= 1
        return not self._unclosed and not self.options.include_usage

    def _ids(self, pieces: Sequence[Piece]) -> list[int] | UnsetType:
        return [token for piece in pieces for token in piece.token_ids] if self.options.return_token_ids else UNSET

    def _provenance(self, pieces: Sequence[Piece]) -> Provenance | UnsetType:
        """Where the tokens of these pieces come from."""
        if not self.options.provenance:
            return UNSET
        steps = [step for piece in pieces for step in piece.steps]
        return Provenance(steps, [token for piece in pieces for token in piece.tokens])

    def _note_prompt(self, index: int, piece: Piece) -> None:
        """Keep the prompt's logprobs: the first choice of a prompt has them, with its first token, for all of them."""
        if piece.prompt_logprobs is not None:
            self._prompts[index] = piece.prompt_logprobs

    def _prompt_entries(self, index: int) -> list[TokenLogprobs | None]:
        return self._prompts[self._leaders[index]]

    def _prompt_logprobs(self, index: int) -> PromptLogprobs | UnsetType:
        if self.options.prompt_logprobs is None:
            return UNSET
        return self._token_decoder.prompt(self._prompt_entries(index), self.options.prompt_logprobs)

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return self.choices[index].request.prompt if self.options.return_token_ids else UNSET


def parsed_arguments(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where max_tokens cut them off in the middle."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):  # a ValidationError is a DecodeError
        return {}
