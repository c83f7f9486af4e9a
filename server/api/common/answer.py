"""The interface of an answer for streaming and collecting, and what all APIs share of it, its statistics included.

An answer owns the choices and turns their pieces into chunks; :mod:`foresay.server.api.common.streaming` decides when
they are sent. Its items are texts, reasoning and calls that open, grow and close, one after the other::

    parts    "On"  "ce"     hm        look(  {"a"  :1}
    items    [ text    ]  [ thought ]  [ call         ]
    events   o  g   g  c  o  g      c  o  g     g     c
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.api.common.route import EVENTS, Framing
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas import chat as schemas
from foresay.server.schemas import shared
from foresay.server.schemas.chat import ChatChunk, ChatCompletion, TextCompletion
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import Part, continues, part_text
from foresay.server.text.tokenizer import Tokenizer
from foresay.server.text.warned import Warned, warning
from foresay.spec.accept import tokens_per_step
from foresay.spec.request import TokenLogprobs

#: Chunks and bodies with metrics, timings and warnings.
T = TypeVar("T")
Finished = TypeVar("Finished", ChatChunk, ChatCompletion, TextCompletion)


class TokenDecoder:
    """Formats tokens and logprobs. as_ids: as ``token_id:17`` instead of their text, which two tokens may share."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, entries: Sequence[TokenLogprobs], chosen_first: bool = False) -> schemas.ChatLogprobs:
        """Logprobs in the format of chat completions. chosen_first: the chosen token comes first, as in vLLM."""
        return schemas.ChatLogprobs([self._chat(_led(entry) if chosen_first else entry) for entry in entries])

    def completion(
        self, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int], offsets: Sequence[int], count: int
    ) -> schemas.CompletionLogprobs:
        """Logprobs in the format of completions. offsets: where each token begins in the text. count: likeliest ones to
        list."""
        return schemas.CompletionLogprobs(
            tokens=[self._legacy(token) for token in tokens],
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            top_logprobs=[None if entry is None else self._listed(entry, count) for entry in entries],
            text_offset=list(offsets),
        )

    def prompt(self, entries: Sequence[TokenLogprobs | None], count: int) -> schemas.PromptLogprobs:
        """Prompt logprobs in vLLM's format."""
        return [None if entry is None else self._ranked(entry, count) for entry in entries]

    def _chat(self, entry: TokenLogprobs) -> schemas.ChatTokenLogprob:
        spelled, text = self._tokenizer.spelled, self._text
        top = [schemas.TopLogprob(text(token), logprob, spelled(token).numbers) for token, logprob in entry.top]
        return schemas.ChatTokenLogprob(text(entry.token), entry.logprob, spelled(entry.token).numbers, top)

    def _listed(self, entry: TokenLogprobs, count: int) -> dict[str, float]:
        """The chosen token and the likeliest. Of tokens with the same text the likeliest counts."""
        listed: dict[str, float] = {}
        for token, logprob in [(entry.token, entry.logprob), *entry.top[:count]]:
            listed[self._legacy(token)] = max(logprob, listed.get(self._legacy(token), logprob))
        return listed

    def _ranked(self, entry: TokenLogprobs, count: int) -> dict[str, schemas.PromptLogprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
        wanted = dict([(entry.token, entry.logprob), *entry.top[:count]])
        return {
            str(one): schemas.PromptLogprob(value, ranks.get(one), self._text(one)) for one, value in wanted.items()
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.spelled(token).text

    def _legacy(self, token: int) -> str:
        """A token's text; ``bytes:..``, as in OpenAI's completions, for one that is not valid text."""
        if self._as_ids:
            return f"token_id:{token}"
        spelled = self._tokenizer.spelled(token)
        return spelled.text if spelled.whole else f"bytes:{spelled.text}"


class Answer(ABC):
    """An answer in progress: identity, usage and metrics are OpenAI's unless an API has its own.

    body: the request, in OpenAI's form. listed: how many of the likeliest tokens to report with each token; None: no
    logprobs at all.
    """

    prefix = ""
    framing: Framing = EVENTS

    def __init__(self, origin: AnswerOrigin, choices: Sequence[Choice], body: shared.GenerationRequest) -> None:
        self.id = f"{self.prefix}-{origin.id}"
        self.model = origin.model
        self.origin = origin
        self.choices = choices
        self.body = body
        self.listed = choices[0].request.params.logprobs
        self.created = int(time.time())
        self._token_decoder = TokenDecoder(choices[0].tokenizer, bool(body.return_tokens_as_token_ids))
        positions = {choice.request.id: index for index, choice in enumerate(choices)}
        self._leaders = [positions[choice.request.fork_of or choice.request.id] for choice in choices]
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self._unclosed = len(choices)

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """Warnings known so far, without duplicates."""
        of_choices = (one for choice in self.choices for one in choice.warnings)
        return tuple(dict.fromkeys((*self.origin.warnings, *of_choices, *self._replaced())))

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The chunks that introduce a choice; by default there are none."""
        return []

    def progress(self, progress: shared.PromptProgress) -> list[msgspec.Struct]:
        """The chunks that report how far the prompt is read; by default there are none."""
        return []

    @abstractmethod
    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """The chunks of a piece."""

    @abstractmethod
    def closing(self) -> list[msgspec.Struct]:
        """The chunks after the last choice has finished."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        """The whole answer, from each choice in one piece."""

    def broken(self, error: shared.ErrorBody) -> msgspec.Struct:
        """The last chunk of a stream that fails: the error."""
        return error

    def _final(self, chunk: Finished) -> Finished:
        """Add metrics, timings and warnings to the last chunk or the whole answer."""
        chunk.system_fingerprint, chunk.metrics = self.origin.fingerprint, self._metrics()
        chunk.timings, chunk.warnings = timings(self.choices) or UNSET, self._warnings()
        return chunk

    @property
    def usage(self) -> shared.Usage:
        """Tokens of all choices so far."""
        return usage(self.choices)

    def _usage(self) -> shared.Usage | UnsetType | None:
        """The ``usage`` of a chunk with choices."""
        found = self.body.stream_options
        if found is None or not self._reports_usage:
            return UNSET
        return self.usage if found.continuous_usage_stats else None

    @property
    def _reports_usage(self) -> bool:
        """Whether a stream ends with a chunk for the usage only."""
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def _metrics(self) -> shared.Metrics | UnsetType:
        level = self.body.spec_decode_metrics or "summary"
        return metrics(self.choices, level, self.origin.exact) or UNSET

    def _warnings(self) -> list[shared.RequestWarning] | UnsetType:
        return [one.for_client for one in self.warnings] or UNSET

    def _replaced(self) -> Iterator[Warned]:
        """Warnings about positions where another engine continued, if the text may differ from there."""
        for index, choice in enumerate(self.choices):
            if (found := choice.statistics) is not None:
                positions = found.ending.changed if self.origin.exact else found.ending.resumed
                yield from (warning("resumed", ("choices", index), at_token=at_token) for at_token in positions)

    def _closes(self, piece: Piece) -> bool:
        """Whether the chunk of this piece is the answer's last. To be called once for each piece, in order."""
        if piece.finish_reason is None:
            return False
        self._unclosed -= 1
        return not self._unclosed and not self._reports_usage

    def _ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.token_ids if self.body.return_token_ids else UNSET

    def _provenance(self, piece: Piece) -> schemas.Provenance | UnsetType:
        return schemas.Provenance(piece.steps, piece.tokens) if self.body.provenance else UNSET

    def _note_prompt(self, index: int, piece: Piece) -> None:
        """Keep the prompt's logprobs: the first choice of a prompt has them, with its first token, for all of them."""
        if piece.prompt_logprobs is not None:
            self._prompts[index] = piece.prompt_logprobs

    def _prompt_entries(self, index: int) -> list[TokenLogprobs | None]:
        return self._prompts[self._leaders[index]]

    def _prompt_logprobs(self, index: int) -> schemas.PromptLogprobs | UnsetType:
        if self.body.prompt_logprobs is None:
            return UNSET
        return self._token_decoder.prompt(self._prompt_entries(index), self.body.prompt_logprobs)

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return self.choices[index].request.prompt if self.body.return_token_ids else UNSET


def known(value: T | UnsetType) -> T | None:
    """None instead of UNSET, for whole answers, which have null for missing values."""
    return None if value is UNSET else value


def _led(entry: TokenLogprobs) -> TokenLogprobs:
    """The entry with the same number of likeliest tokens, the chosen one first."""
    others = [one for one in entry.top if one[0] != entry.token]
    return msgspec.structs.replace(entry, top=[(entry.token, entry.logprob), *others][: len(entry.top)])


def parsed_arguments(arguments: str) -> dict[str, Any]:
    """The arguments of a call; empty if max_tokens cut them off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):  # a ValidationError is a DecodeError
        return {}


Event = TypeVar("Event")


@dataclass(slots=True)
class Item:
    """A text, reasoning or a call. first: its first part. text: so far; a call's arguments. made: the API's own object
    for it."""

    index: int
    first: Part
    text: str = ""
    made: Any = None


class Items(Generic[Event]):
    """The items of one answer. Subclasses make the events of an API; by default there are none."""

    def __init__(self) -> None:
        self.open: Item | None = None
        self._count = 0

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """Take more parts: one of another kind, or of another call, closes the open item and opens the next."""
        events: list[Event] = []
        for part in parts:
            if self.open is None or not continues(self.open.first, part):
                events += self.close()
                self.open = Item(self._count, part)
                self._count += 1
                events += self.opens(self.open)
            self.open.text += part_text(part)
            events += self.grows(self.open, part_text(part))
        return events

    def close(self) -> list[Event]:
        """Close the open item, if there is one."""
        item, self.open = self.open, None
        return [] if item is None else self.closes(item)

    def opens(self, item: Item) -> list[Event]:
        """Events of an item that opens, still empty."""
        return []

    def grows(self, item: Item, more: str) -> list[Event]:
        """Events of an item that grows; the first part of a call may have no text."""
        return []

    def closes(self, item: Item) -> list[Event]:
        """An item is complete."""
        return []


# -- statistics: usage, vLLM's metrics, llama.cpp's timings ------------------------------------------------------------


def usage(choices: Sequence[Choice]) -> shared.Usage:
    """Tokens of all choices so far. A prompt counts once, however many choices continue it."""
    prompts = [choice for choice in choices if choice.request.fork_of is None]
    prompt = sum(len(choice.request.prompt) for choice in prompts)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in prompts)
    counts = completion_details(choices)
    has_details = counts.reasoning_tokens or counts.accepted_prediction_tokens is not UNSET
    details = counts if has_details else UNSET
    return shared.Usage(prompt, completion, prompt + completion, shared.PromptTokensDetails(cached), details)


def completion_details(choices: Sequence[Choice]) -> shared.CompletionTokensDetails:
    """Details of the completion tokens; those about predictions only if there was one."""
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    if all(choice.request.prediction is None for choice in choices):
        return shared.CompletionTokensDetails(reasoning)
    accepted = sum(choice.accepted_prediction_tokens for choice in choices)
    rejected = sum(choice.rejected_prediction_tokens for choice in choices)
    return shared.CompletionTokensDetails(reasoning, accepted, rejected)


def metrics(choices: Sequence[Choice], level: shared.MetricsLevel, exact: bool) -> shared.Metrics | None:
    """Times and drafting of all choices: the first choice's first token, the longest generation, counts added up.

    None if not wanted, or if a choice ended without statistics.
    """
    known = [choice.statistics for choice in choices if choice.statistics is not None]
    if level == "none" or len(known) < len(choices):
        return None
    decode = max(one.decode_seconds for one in known)
    longest = max(choice.completion_tokens for choice in choices)
    per_step = tokens_per_step(sum(choice.completion_tokens for choice in choices), sum(one.steps for one in known))
    return shared.Metrics(
        time_to_first_token_ms=_milliseconds(min(one.time_to_first_token for one in known)),
        generation_time_ms=_milliseconds(decode),
        queue_time_ms=_milliseconds(max(one.seconds.get("queue", 0.0) for one in known)),
        mean_itl_ms=_milliseconds(decode / (longest - 1)) if longest > 1 else None,
        tokens_per_second=round(sum(one.decode_tokens_per_second for one in known), 2),
        tokens_per_step=None if per_step is None else round(per_step, 4),
        exact=exact,
        resumed=max(len(one.ending.resumed) for one in known),
        speculative_decoding=speculative_decoding(choices, level),
    )


def timings(choices: Sequence[Choice]) -> shared.Timings | None:
    """The times of all choices together, in llama.cpp's format; None if one ended without statistics."""
    known = [choice.statistics for choice in choices if choice.statistics is not None]
    if len(known) < len(choices):
        return None
    counts = usage(choices)
    cached, written = counts.prompt_tokens_details.cached_tokens, counts.completion_tokens
    read, later = counts.prompt_tokens - cached, max(0, written - len(choices))  # first tokens come with the prompt
    prompt_ms = _milliseconds(max(0.0, *(one.time_to_first_token - one.seconds.get("queue", 0.0) for one in known)))
    decode_ms = _milliseconds(max(one.decode_seconds for one in known))
    drafting = speculative_decoding(choices, "summary")
    return shared.Timings(
        cache_n=cached,
        prompt_n=read,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, read),
        prompt_per_second=_ratio(1000 * read, prompt_ms),
        predicted_n=written,
        predicted_ms=decode_ms,
        predicted_per_token_ms=_ratio(decode_ms, later),
        predicted_per_second=_ratio(1000 * later, decode_ms),
        draft_n=UNSET if drafting is None else drafting.num_draft_tokens,
        draft_n_accepted=UNSET if drafting is None else drafting.num_accepted_draft_tokens,
    )


def _ratio(over: float, under: float) -> float:
    return over / under if under else 0.0


def speculative_decoding(choices: Sequence[Choice], level: shared.MetricsLevel) -> shared.SpeculativeDecoding | None:
    """Drafting statistics over the steps that drafted; None if no drafter is configured."""
    levels = max((choice.statistics.num_spec_tokens for choice in choices if choice.statistics), default=0)
    if levels == 0:
        return None
    steps = [step for choice in choices for step in drafting_steps(choice)]
    drafted = sum(drafted for drafted, _ in steps)
    accepted = sum(accepted for _, accepted in steps)
    histogram = [0] * (levels + 1)
    for _, count in steps:
        histogram[count] += 1
    detailed = level == "detailed"
    return shared.SpeculativeDecoding(
        mean_acceptance_length=round(1 + accepted / len(steps), 4) if steps else 1.0,
        draft_acceptance_rate=round(accepted / drafted, 4) if drafted else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=levels,
        per_step_accepted=[accepted for _, accepted in steps] if detailed else UNSET,
        per_step_drafted=[drafted for drafted, _ in steps] if detailed else UNSET,
    )


def drafting_steps(choice: Choice) -> list[tuple[int, int]]:
    """Drafted tokens of each step that drafted, and those accepted that are in the text."""
    steps = zip(choice.counts.per_step_drafted, choice.counts.per_step_accepted, strict=True)
    return [(drafted, accepted) for drafted, accepted in steps if drafted]


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
