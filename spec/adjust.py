"""What a request changes about its logits: bias, penalties and bans, at every node as plain decoding would there.

A node's penalties count the committed tokens and those on its path. The columns of committed tokens are written for
all rows at once; then, in each row, the tokens of its path are computed again *from the raw logits* with the larger
count (a repetition penalty multiplies, so a correction cannot be added). A value is one formula of (logit, count),
whoever counted: the bits are those of plain decoding. See docs/options.md.

Order: logit bias; repetition penalty; frequency and presence penalties; bans. Nothing here is made, and no row is
copied, for a request that asks for none of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from foresay.spec.sampling import SamplingParams

#: The tokens on the path of one node, the root (which is committed) left out.
Path = Sequence[int]


class Adjustment:
    """The changes one sequence asks for. Owns the counts of its committed tokens; tell it each with :meth:`count`."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self._sampling, self._vocab_size = sampling, vocab_size
        self._bias = _Bias(sampling.logit_bias) if sampling.logit_bias else None
        self._penalties = _Penalties(sampling, prompt) if _penalised(sampling) else None
        self._phrases = _Phrases(sampling.bad_words) if any(len(words) > 1 for words in sampling.bad_words) else None
        self._banned = _always_banned(sampling, vocab_size)

    @classmethod
    def of(cls, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> Adjustment | None:
        """None if the request leaves its logits alone."""
        bans = sampling.bad_words or sampling.allowed_token_ids is not None
        if not (bans or sampling.logit_bias or _penalised(sampling)):
            return None
        return cls(sampling, prompt, vocab_size)

    @property
    def by_path(self) -> bool:
        """Whether rows differ by their paths."""
        return self._penalties is not None or self._phrases is not None

    def count(self, token: int) -> None:
        """A token was committed to the output."""
        if self._penalties is not None:
            self._penalties.counts.add(token)

    def apply(self, logits: Tensor, text: Sequence[int], paths: Sequence[Path]) -> None:
        """Change raw logits in place.

        logits: fp32[N, V], V as given at the start (a drafter's may be narrower: it is then left alone). text: the
        committed tokens. paths: one for each row.
        """
        if logits.shape[-1] != self._vocab_size:
            return
        if self._bias is not None:
            self._bias.apply(logits)
        if self._penalties is not None:
            self._penalties.apply(logits, paths)
        if self._banned is not None:
            logits.masked_fill_(self._banned, -math.inf)
        if self._phrases is not None:
            self._phrases.apply(logits, text, paths)


def _penalised(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def _always_banned(sampling: SamplingParams, vocab_size: int) -> Tensor | None:
    """bool[V]: tokens that are banned wherever they stand; None if there are none."""
    words = [words[0] for words in sampling.bad_words if len(words) == 1]
    if not words and sampling.allowed_token_ids is None:
        return None
    banned = torch.full((vocab_size,), sampling.allowed_token_ids is not None)
    banned[list(sampling.allowed_token_ids or ())] = False
    banned[words] = True
    return banned


class _Bias:
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids, self._values = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, logits: Tensor) -> None:
        logits.index_copy_(1, self._ids, logits.index_select(1, self._ids) + self._values)


class _Counts:
    """How often each token seen so far is in the output. Tokens of the prompt are seen with count 0."""

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = sorted(set(prompt))
        self._places = {token: place for place, token in enumerate(distinct)}
        self._ids = torch.tensor(distinct, dtype=torch.int64)
        self._counts = torch.zeros(len(distinct))

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = torch.zeros(max(64, place))
            self._ids, self._counts = torch.cat((self._ids, room.long())), torch.cat((self._counts, room))
        self._ids[place] = token
        self._counts[place] += 1.0

    def of(self, token: int) -> float:
        place = self._places.get(token)
        return 0.0 if place is None else float(self._counts[place])

    @property
    def ids(self) -> Tensor:
        """int64[M]: the tokens seen, each once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Tensor:
        """fp32[M]: their counts."""
        return self._counts[: len(self._places)]


class _Penalties:
    """Makes what was said less likely (or more, if the penalty is negative)."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = sampling.repetition_penalty
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self.counts = _Counts(prompt if self._repetition != 1.0 else ())

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        rows, tokens, counts = self._on_paths(paths)
        again = self._penalised(logits[rows, tokens], counts) if tokens else None
        ids = self.counts.ids
        logits.index_copy_(1, ids, self._penalised(logits.index_select(1, ids), self.counts.counts))
        if again is not None:
            logits[rows, tokens] = again

    def _on_paths(self, paths: Sequence[Path]) -> tuple[list[int], list[int], Tensor]:
        """For each row and each distinct token of its path: row, token, and how often plain decoding would count it."""
        found = [(row, token, path.count(token)) for row, path in enumerate(paths) for token in dict.fromkeys(path)]
        known = {token: self.counts.of(token) for token in {token for _, token, _ in found}}
        counts = torch.tensor([known[token] + times for _, token, times in found])
        return [row for row, _, _ in found], [token for _, token, _ in found], counts

    def _penalised(self, logits: Tensor, counts: Tensor) -> Tensor:
        """The one formula: of tokens that were seen, and were said ``counts`` times."""
        if self._repetition != 1.0:
            logits = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        if self._frequency or self._presence:
            logits = logits - (self._frequency * counts + self._presence * (counts > 0))
        return logits


class _Phrases:
    """Bans the last token of a sequence wherever the tokens before it have just been said."""

    def __init__(self, phrases: Iterable[Sequence[int]]) -> None:
        self._by_end: dict[int, list[tuple[list[int], int]]] = {}
        for *start, last in phrases:
            if start:
                self._by_end.setdefault(start[-1], []).append((start, last))
        self._longest = max(len(start) for start, _ in chain(*self._by_end.values()))

    def apply(self, logits: Tensor, text: Sequence[int], paths: Sequence[Path]) -> None:
        tail = list(text[-self._longest :])
        for row, path in enumerate(paths):
            said = [*tail, *path]
            banned = [last for start, last in self._by_end.get(said[-1], ()) if said[-len(start) :] == start]
            logits[row, banned] = -math.inf


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The path of every node of a tree, root first in number and left out of the paths."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return paths
