"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Sequence
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UnsetType

from foresay.server.api.common import validation
from foresay.server.api.common.answer import Answer, known
from foresay.server.api.common.route import EVENTS, Route, Stream
from foresay.server.api.common.turns import answered, completion_choices, infilled, leasing
from foresay.server.models.service import AnswerOrigin, Service, Text
from foresay.server.schemas.chat import CompletionChoice, CompletionLogprobs, CompletionRequest, TextCompletion
from foresay.server.schemas.shared import ErrorBody, GenerationRequest, PromptProgress, Usage
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest


async def completion_prompts(service: Service, body: CompletionRequest) -> Sequence[str | list[int]]:
    """The prompts of a completion; with a ``suffix``, as token ids."""
    given = validation.prompts(body)
    if not body.suffix:
        return given
    for field in ("echo", "truncate_prompt_tokens"):
        if getattr(body, field):
            raise InvalidRequest(field, " and suffix cannot be combined")
    return await infilled(service, given, body.suffix, "suffix", body.add_special_tokens is not False)


# -- echo: the prompt before the answer ------------------------------------------------------------


class Echo(msgspec.Struct, frozen=True):
    """text: the prompt's. offsets: where each of its tokens begins in it."""

    text: str
    offsets: list[int]


def echoed(body: CompletionRequest, prompt: str | list[int], tokens: list[int], tokenizer: Tokenizer) -> Echo:
    """The echo of a prompt that became ``tokens``: unchanged if it is text and was not truncated."""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return Echo(prompt, _offsets(tokens, frozenset(), len(prompt), tokenizer))
    skip = body.skip_special_tokens is not False
    text = tokenizer.decode(tokens, skip_special_tokens=skip)
    return Echo(text, _offsets(tokens, tokenizer.special_ids if skip else frozenset(), len(text), tokenizer))


def _offsets(tokens: Sequence[int], hidden: frozenset[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """For each token, the number of complete characters before it."""
    decoder, starts, so_far = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in tokens:
        starts.append(so_far)
        if token not in hidden:
            so_far += len(decoder.decode(tokenizer.token_bytes(token)))
    # What the tokenizer prepends (a begin token, a space) is not part of the text.
    surplus = so_far + len(decoder.decode(b"", True)) - length
    return [min(max(start - surplus, 0), length) for start in starts]


# -- the answers -------------------------------------------------------------------------------------------------------


class CompletionAnswer(Answer):
    """``text_completion``. echoes: what precedes each choice; empty if nothing does."""

    prefix = "cmpl"

    def __init__(
        self, origin: AnswerOrigin, choices: Sequence[Choice], body: GenerationRequest, echoes: Sequence[Echo] = ()
    ) -> None:
        super().__init__(origin, choices, body)
        self._echoes = echoes
        self._introduced = [False] * len(choices)

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The echoed prompt, if any. With prompt logprobs, which come with the first token, it waits for them."""
        return [] if self._scores_prompt else self._introduction(index)

    def progress(self, progress: PromptProgress) -> list[msgspec.Struct]:
        chunk = self._chunk([CompletionChoice(index=0, text="")], self._usage())
        chunk.prompt_progress = progress
        return [chunk]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """One chunk; the last one of a choice carries its finish reason."""
        self._note_prompt(index, piece)
        # Without a first token, as where a grammar leaves none, the prompt's log-probabilities never come.
        waits = self._scores_prompt and self._leaders[index] not in self._prompts
        chunks = [] if self._introduced[index] or waits else self._introduction(index)
        if self._shows(piece) or piece.finish_reason is not None:
            chunk = self._chunk([self._choice_of(index, piece)], self._usage())
            chunks.append(self._final(chunk) if self._closes(piece) else chunk)
        return chunks

    def closing(self) -> list[msgspec.Struct]:
        if not self._reports_usage:
            return []
        return [self._final(self._chunk([], self.usage))]

    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        choices = []
        for index, piece in enumerate(pieces):
            self._note_prompt(index, piece)
            choices.append(_whole(self._before(index), self._choice_of(index, piece)))
        return self._final(self._chunk(choices, self.usage))

    # -- inside --------------------------------------------------------------------------------------------------

    def _shows(self, piece: Piece) -> bool:
        """Whether a piece has any content."""
        ids = self.body.return_token_ids and piece.token_ids
        return bool(piece.text or piece.logprobs or piece.steps or piece.tokens or ids)

    def _introduction(self, index: int) -> list[msgspec.Struct]:
        """The chunk before a choice's first token, if it has any content."""
        self._introduced[index] = True
        before = self._before(index)
        shown = before.text or before.logprobs or self.body.return_token_ids or self._scores_prompt
        return [self._chunk([before], self._usage())] if shown else []

    def _before(self, index: int) -> CompletionChoice:
        """The prompt's part of a choice: the echo, its logprobs, its ids."""
        return CompletionChoice(
            index=index,
            text=self._echoes[index].text if self._echoes else "",
            logprobs=self._echoed_logprobs(index),
            prompt_token_ids=self._prompt_ids(index),
            prompt_logprobs=self._prompt_logprobs(index),
        )

    def _echoed_logprobs(self, index: int) -> CompletionLogprobs | None:
        if self.listed is None or not self._echoes:
            return None
        tokens, offsets = self.choices[index].request.prompt, self._echoes[index].offsets
        return self._token_decoder.completion(self._prompt_entries(index), tokens, offsets, self.listed)

    def _choice_of(self, index: int, piece: Piece) -> CompletionChoice:
        """What a piece adds to a choice."""
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(index, piece),
            token_ids=self._ids(piece),
            provenance=self._provenance(piece),
        )
        if piece.finish_reason is not None:
            ended = self.choices[index]
            choice.finish_reason, choice.stop_reason, choice.seed = ended.finish_reason, ended.stop_reason, ended.seed
        return choice

    def _logprobs(self, index: int, piece: Piece) -> CompletionLogprobs | None:
        if self.listed is None:
            return None
        begin = len(self._echoes[index].text) if self._echoes else 0
        offsets = [begin + offset for offset in piece.offsets]
        return self._token_decoder.completion(piece.logprobs, piece.token_ids, offsets, self.listed)

    @property
    def _scores_prompt(self) -> bool:
        return self.body.prompt_logprobs is not None or (self.listed is not None and bool(self._echoes))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> TextCompletion:
        return TextCompletion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


def _whole(before: CompletionChoice, after: CompletionChoice) -> CompletionChoice:
    """A whole choice, of the prompt's part and the answer's, with null for what is missing."""
    after.text = before.text + after.text
    if before.logprobs is not None and after.logprobs is not None:
        for field in CompletionLogprobs.__struct_fields__:
            setattr(after.logprobs, field, getattr(before.logprobs, field) + getattr(after.logprobs, field))
    after.token_ids, after.prompt_token_ids = known(after.token_ids), known(before.prompt_token_ids)
    after.prompt_logprobs = known(before.prompt_logprobs)
    return after


@leasing(EVENTS)
async def completions(http: web.Request, service: Service, body: CompletionRequest) -> web.StreamResponse:
    """Continue one prompt or several."""
    text, _ = service.opened()
    given = await completion_prompts(service, body)
    choices = await completion_choices(service, body, given)
    echoes = await asyncio.to_thread(_echoes, text, body, given, choices) if body.echo else []
    return await answered(http, service, body, choices, partial(CompletionAnswer, echoes=echoes))


def _echoes(text: Text, body: CompletionRequest, given: Sequence[str | list[int]], choices: list[Choice]) -> list[Echo]:
    """The echo of each choice; a prompt may have several choices."""
    each = len(choices) // len(given)
    made = [echoed(body, one, choices[each * index].request.prompt, text.tokenizer) for index, one in enumerate(given)]
    return [echo for echo in made for _ in range(each)]


_STREAM = Stream(EVENTS, (TextCompletion, ErrorBody))
ROUTES = [Route("POST", "/v1/completions", completions, CompletionRequest, TextCompletion, _STREAM)]
