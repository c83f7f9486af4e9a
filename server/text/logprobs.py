"""Logprobs in the words of each API. The engine speaks of token ids; here they get their spelling."""

from __future__ import annotations

from collections.abc import Sequence

from server.schemas.logprobs import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from server.text.tokenizer import Tokenizer
from spec.request import TokenLogprobs


class TokenDecoder:
    """Spells tokens. as_ids: as ``token_id:17`` instead of their text, which two tokens may share."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """As chat completions have them."""
        return ChatLogprobs([self._chat(entry) for entry in entries])

    def completion(
        self, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int], offsets: Sequence[int], count: int
    ) -> CompletionLogprobs:
        """As completions have them. offsets: where each token begins in the text. count: likeliest ones to list."""
        return CompletionLogprobs(
            tokens=[self._legacy(token) for token in tokens],
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            top_logprobs=[None if entry is None else self._listed(entry, count) for entry in entries],
            text_offset=list(offsets),
        )

    def prompt(self, entries: Sequence[TokenLogprobs | None], count: int) -> PromptLogprobs:
        """As vLLM reports those of a prompt."""
        return [None if entry is None else self._ranked(entry, count) for entry in entries]

    def _chat(self, entry: TokenLogprobs) -> ChatTokenLogprob:
        spelled, text = self._tokenizer.spelled, self._text
        top = [TopLogprob(text(token), logprob, spelled(token).numbers) for token, logprob in entry.top]
        return ChatTokenLogprob(text(entry.token), entry.logprob, spelled(entry.token).numbers, top)

    def _listed(self, entry: TokenLogprobs, count: int) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of tokens that are spelled alike the likeliest counts."""
        listed: dict[str, float] = {}
        for token, logprob in [*entry.top[:count], (entry.token, entry.logprob)]:
            listed.setdefault(self._legacy(token), logprob)
        return listed

    def _ranked(self, entry: TokenLogprobs, count: int) -> dict[str, PromptLogprob]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
        wanted = dict([(entry.token, entry.logprob), *entry.top[:count]])
        return {str(one): PromptLogprob(value, ranks.get(one), self._text(one)) for one, value in wanted.items()}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.spelled(token).text

    def _legacy(self, token: int) -> str:
        """As OpenAI's completions spell a token that is no text."""
        if self._as_ids:
            return f"token_id:{token}"
        spelled = self._tokenizer.spelled(token)
        return spelled.text if spelled.whole else f"bytes:{spelled.text}"
