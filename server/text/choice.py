"""One running choice of an answer: deltas of token ids in, text deltas out.

A token may end inside a character, and some tokenizers strip the space before a text's first word, so
``decode(a) + decode(b)`` is not ``decode(a + b)``. The detokenizer therefore decodes a short window::

    window   [ context: tokens whose text is out | fresh: tokens since the text last ended in a whole character ]
    text     |---------- emitted ----------------|---- new: goes out ----|-- U+FFFD..: held --|

Each token costs two decodes of that window, however long the text. (``tokenizers.DecodeStream`` is similar, but its
window grows without bound on bytes that never complete a character and on tokens without text, and it has no flush.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from foresay.server.schemas.chat import StepProvenance, TokenProvenance
from foresay.server.schemas.shared import FinishReason
from foresay.server.text.parts import OutputParser, Part, PlainText, ToolCallPart, joined, step_of, tokens_of
from foresay.server.text.tokenizer import Tokenizer
from foresay.server.text.warned import Warned
from foresay.spec.names import PREDICTION
from foresay.spec.request import Delta, Origin, Request, TokenLogprobs
from foresay.spec.trace import Statistics

REPLACEMENT = "\ufffd"
#: A character has at most four bytes, so at most three bytes at the end can be an incomplete character.
LONGEST_CHARACTER = 4
MOST_FRESH = 16
CONTEXT_TOKENS = 6


class Piece(msgspec.Struct, kw_only=True):
    """What a delta adds to the answer. finish_at: number of the output token with which the text ends.

    text: as the model wrote it; parts: the same, split by the choice's parser. logprobs: one entry per token, if
    requested. offsets: for each token, the number of complete characters before it. prompt_logprobs: once, if
    requested.
    steps, tokens: their provenance, if requested.
    """

    text: str = ""
    parts: list[Part] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    offsets: list[int] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    finish_at: int | None = None
    steps: list[StepProvenance] = []
    tokens: list[TokenProvenance] = []


def merged(pieces: Sequence[Piece]) -> Piece:
    """The concatenation of several pieces."""
    if len(pieces) == 1:
        return pieces[0]
    lists = ("token_ids", "logprobs", "offsets", "steps", "tokens")
    return Piece(
        text="".join(piece.text for piece in pieces),
        parts=joined([part for piece in pieces for part in piece.parts]),
        prompt_logprobs=next((one.prompt_logprobs for one in pieces if one.prompt_logprobs is not None), None),
        finish_reason=pieces[-1].finish_reason,
        finish_at=pieces[-1].finish_at,
        **{name: [entry for piece in pieces for entry in getattr(piece, name)] for name in lists},
    )


class Choice:
    """The text, counts and ending of one request.

    context: prompt tokens whose text precedes the answer's (empty if the answer starts a new text). parser: splits the
    text into parts. warnings: what of the request is not done as requested. stop: strings that end the text. silent: no
    tokens are wanted; the one that the engine still emits is dropped. provenance: record the origin of each token, and
    what it adds. tokens: the output so far, including the token that ended it. counts: of its steps.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        context: Sequence[int] = (),
        parser: OutputParser | None = None,
        warnings: tuple[Warned, ...] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        silent: bool = False,
        provenance: bool = False,
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.warnings = warnings
        self.tokens: list[int] = []
        self.reasoning_tokens = 0
        self.accepted_prediction_tokens = self.rejected_prediction_tokens = 0
        self.cached_tokens = 0
        self.seed = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.counts = Statistics(prompt_tokens=len(request.prompt))
        self._silent, self._provenance, self._include_stop = silent, provenance, include_stop
        self._quiet_stops = set(eos_token_ids) - set(request.params.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens)
        self._search = StopSearch(stop, include_stop)
        self._parser: OutputParser = parser or PlainText()
        self._length = 0
        self._called = False
        self._cut = False

    @property
    def completion_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens)

    @property
    def statistics(self) -> Statistics | None:
        """Its counts, once it has ended."""
        return self.counts if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the last delta was taken."""
        return self.finish_reason is not None

    def take(self, delta: Delta) -> Piece:
        """Turn a delta into the piece of text that is certain with it."""
        made, given = len(delta.tokens), delta
        if self._silent:
            delta = _silenced(delta)
        piece = Piece(prompt_logprobs=delta.prompt_logprobs)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        over = self._cut
        begins = [] if over else self._feed(delta, piece)
        self.counts.take(given, len(piece.token_ids))
        if delta.origin is not None and not over:
            self._count_predicted(delta.origin, len(piece.token_ids))
        if delta.finish_reason is not None:
            self._finish(delta, piece)
        if self._provenance and delta.origin is not None:
            piece.steps = [step_of(delta.origin, len(piece.token_ids), made)]
            piece.tokens = tokens_of(delta.origin, piece.token_ids, _parts_of(piece, begins), piece.logprobs)
        piece.parts = joined(piece.parts)
        self._called = self._called or any(isinstance(part, ToolCallPart) for part in piece.parts)
        if piece.finish_reason == "stop" and self._called:
            self.finish_reason = piece.finish_reason = "tool_calls"
        return piece

    def _feed(self, delta: Delta, piece: Piece) -> list[int]:
        """Feed tokens one by one, as in plain decoding, up to the one that completes a stop string.

        Returns where in the piece's parts each token begins.
        """
        count, begins = 0, []
        for count, token in enumerate(delta.tokens, start=1):
            self.tokens.append(token)
            begins.append(len(piece.parts))
            piece.offsets.append(self._length)
            last = count == len(delta.tokens) and delta.finish_reason == "stop" and delta.stop_token == token
            if last and not self._include_stop:
                pass
            elif token in self._parser.markers:
                self._mark(token, piece)
            else:
                self._append(self._released(self._counted(self._detokenizer.step(token))), piece)
            self.reasoning_tokens += self._parser.thinking
            self._cut = self._cut or self._parser.complete
            if self._cut:
                piece.finish_at = self.completion_tokens
                break
        piece.token_ids = delta.tokens[:count]
        piece.logprobs = (delta.logprobs or [])[:count]
        return begins

    def _count_predicted(self, origin: Origin, kept: int) -> None:
        """Count draft tokens of the prediction; only those in the text count as accepted."""
        if not origin.predicted:
            return
        if origin.sources:
            accepted = origin.sources[:kept].count(PREDICTION)
        else:
            accepted = sum(node > origin.forced for node in origin.path[:kept])
        self.accepted_prediction_tokens += accepted
        self.rejected_prediction_tokens += origin.predicted - accepted

    def _mark(self, token: int, piece: Piece) -> None:
        """Handle a marker token: the text before it is released completely."""
        self._append(self._released(self._counted(self._detokenizer.flush())), piece)
        if not self._cut:
            self._append(self._search.flush(), piece)
            piece.parts += self._parser.marker(token)

    def _counted(self, text: str) -> str:
        self._length += len(text)
        return text

    def _append(self, text: str, piece: Piece) -> None:
        """Add certain text to the piece."""
        piece.text += text
        piece.parts += self._parser.feed(text)

    def _released(self, text: str) -> str:
        """The part of the text that may be sent; records a stop string. Up to min_tokens none is searched for."""
        if self.completion_tokens <= self.request.params.min_tokens or self._parser.heading:
            return text
        released, stop = self._search.feed(text)
        if stop is not None:
            self._cut, self.stop_reason = True, stop
        return released

    def _finish(self, delta: Delta, piece: Piece) -> None:
        if not self._cut:
            self._append(self._released(self._detokenizer.flush()), piece)
        if not self._cut:
            self._append(self._search.flush(), piece)
            if delta.stop_token is not None and delta.stop_token not in self._quiet_stops:
                self.stop_reason = delta.stop_token
        piece.parts += self._parser.flush()
        self.finish_reason = piece.finish_reason = "stop" if self._cut or delta.finish_reason == "stop" else "length"
        self.seed = delta.seed


def _silenced(delta: Delta) -> Delta:
    """A delta without its tokens: the finish reason becomes ``length``, since no tokens are wanted."""
    reason: FinishReason | None = None if delta.finish_reason is None else "length"
    return msgspec.structs.replace(delta, tokens=[], logprobs=None, stop_token=None, finish_reason=reason)


def _parts_of(piece: Piece, begins: Sequence[int]) -> list[list[Part]]:
    """What each token of a piece adds; what is flushed at the end belongs to the last one."""
    return [piece.parts[begin:end] for begin, end in pairwise([*begins, len(piece.parts)])]


# -- its text ----------------------------------------------------------------------------------------------------------


class Detokenizer:
    """The text of one growing token sequence. ``step`` returns text that is certain, ``flush`` the rest.

    All pieces together equal the whole text decoded at once (minus the context's). context: preceding tokens, whose
    text is not repeated but determines leading spaces.
    """

    def __init__(self, decoder: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._hidden = decoder.special_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context[-CONTEXT_TOKENS:] if token not in self._hidden]
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):  # the prompt ends inside a character, which cannot be completed
            self._window, text = [], ""
        self._emitted = len(text)
        self._fresh = 0

    def step(self, token: int) -> str:
        """Add one token; return the characters that it completes, possibly none."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        self._fresh += 1
        text = self._decode(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        if whole == len(text):
            return self._emit_all(text)
        if self._fresh > LONGEST_CHARACTER:  # these bytes do not start a character
            whole = max(whole, len(text) - LONGEST_CHARACTER + 1)
        piece = text[self._emitted : whole]
        self._emitted = max(self._emitted, whole)
        if self._fresh > MOST_FRESH:
            self._shorten(len(text) - self._emitted)
        return piece

    def flush(self) -> str:
        """The sequence has ended: what was held back, with broken characters as U+FFFD."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=False) if ids else ""

    def _emit_all(self, text: str) -> str:
        piece = text[self._emitted :]
        self._window = self._window[-self._fresh :]
        self._emitted, self._fresh = len(self._decode(self._window)), 0
        return piece

    def _shorten(self, held: int) -> None:
        self._window = self._window[-MOST_FRESH // 2 :]
        self._fresh = len(self._window)
        self._emitted = max(0, len(self._decode(self._window)) - held)


class StopSearch:
    """Cuts a growing text at the first stop string, and holds back only possible beginnings of one.

    The first is the one that ends earliest (the longest of those), so the cut depends only on the text and not on how
    it was split. include: whether the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Add text; return the text that may be sent and the stop string found, if any. After that, feed no more."""
        if not self._stops:
            return piece, None
        text, self._held = self._held + piece, ""
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, stop = min(found)
            return text[: end if self._include else end - len(stop)], stop
        places = range(max(0, len(text) - self._longest + 1), len(text))
        certain = next((at for at in places if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held
