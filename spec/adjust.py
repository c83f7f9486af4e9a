"""What a request changes in its logits: bias, penalties and bans, at every node as in plain decoding.

A node's penalties count the committed tokens and those on its path. The columns of committed tokens are written for
all rows at once; then, in each row, the tokens of its path are computed again *from the raw logits* with the larger
count (a repetition penalty multiplies, so a correction cannot be added). A value is one formula of (logit, count),
wherever the token was counted: the bits are those of plain decoding. See docs/options.md.

The changes are a value, :class:`LogitEdits`, which :func:`edit_logits` applies on the device of the logits. Order:
logit bias; repetition penalty; frequency and presence penalties; bans. A request that uses none of it costs nothing
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from foresay.spec.sampling import SamplingParams

#: The tokens on the path of one node, without the root (which is committed).
Path = Sequence[int]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Tokens that become less likely (or more, if a penalty is negative), since the text has them already.

    ids: int64[M], tokens of the text before the tree, with counts, fp32[M]: for every row. rows, tokens: int64[K], the
    tokens on a row's path, with their counts there including those before, ``times``, fp32[K].
    """

    ids: Tensor
    counts: Tensor
    rows: Tensor
    tokens: Tensor
    times: Tensor
    repetition: float
    frequency: float
    presence: float

    def apply(self, logits: Tensor) -> None:
        """Change raw logits in place."""
        columns = (self.ids, self.counts, self.rows, self.tokens, self.times)
        ids, counts, rows, tokens, times = (column.to(logits.device) for column in columns)
        on_paths = self._penalised(logits[rows, tokens], times)
        logits.index_copy_(1, ids, self._penalised(logits.index_select(1, ids), counts))
        logits[rows, tokens] = on_paths

    def _penalised(self, logits: Tensor, counts: Tensor) -> Tensor:
        """The formula, for tokens that were seen, with these counts in the output."""
        if self.repetition != 1.0:
            logits = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        if self.frequency or self.presence:
            logits = logits - (self.frequency * counts + self.presence * (counts > 0))
        return logits


@dataclass(slots=True)
class LogitEdits:
    """What one request changes in the logits of a tree's nodes, one row each. All of it is on the host.

    bias: ids, int64[M], and what is added to their logits, fp32[M]. allowed: int32[N, ceil(V / 32)], or one row for all
    nodes: bit ``t % 32`` of word ``t // 32`` says that token t may be sampled. banned: (row, token) pairs that may not.
    recorded: rows and the only token left in each, allowed or not, unless nothing could be sampled.
    """

    bias: tuple[Tensor, Tensor] | None = None
    penalties: Penalties | None = None
    allowed: Tensor | None = None
    banned: list[tuple[int, int]] = field(default_factory=list)
    recorded: list[tuple[int, int]] = field(default_factory=list)


@torch.inference_mode()
def edit_logits(logits: Tensor, edits: LogitEdits, keep: Callable[[Tensor, Tensor], None] | None = None) -> None:
    """Change raw logits in place, on their device. logits: fp32[N, V]. keep: another :func:`keep_allowed`."""
    if edits.bias is not None:
        ids, values = (column.to(logits.device) for column in edits.bias)
        logits.index_copy_(1, ids, logits.index_select(1, ids) + values)
    if edits.penalties is not None:
        edits.penalties.apply(logits)
    if edits.allowed is not None:
        (keep or keep_allowed)(logits, edits.allowed.to(logits.device))
    if edits.banned:
        logits[_at(edits.banned, logits)] = -math.inf
    if edits.recorded:
        rows, tokens = _at(edits.recorded, logits)
        before = logits[rows]
        sound = before.isfinite().any(dim=1) & ~before.isnan().any(dim=1)
        alone = torch.full_like(before, -math.inf).scatter_(1, tokens[:, None], 0.0)
        logits[rows] = torch.where(sound[:, None], alone, before)


def keep_allowed(logits: Tensor, allowed: Tensor) -> None:
    """Minus infinity, in place, for each token whose bit is not set. logits: fp32[N, V]. allowed: int32[N,
    ceil(V / 32)], or one row for all."""
    logits.masked_fill_(~unpacked(allowed, logits.shape[1]), -math.inf)


def unpacked(words: Tensor, count: int) -> Tensor:
    """bool[N, count]: the bits of int32[N, ceil(count / 32)]."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    return (words[:, :, None] >> bits).bitwise_and(1).flatten(1)[:, :count] != 0


def packed(bits: Tensor) -> Tensor:
    """int32[N, ceil(V / 32)]: bool[N, V] packed 32 to a word; bits past the last column are 0."""
    wide = np.zeros((len(bits), -(-bits.shape[1] // 32) * 4), dtype=np.uint8)
    found = np.packbits(bits.numpy(), axis=1, bitorder="little")
    wide[:, : found.shape[1]] = found
    return torch.from_numpy(wide.view(np.int32))


def _at(pairs: Sequence[tuple[int, int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """int64[K] each: rows and columns of logits, on their device."""
    rows, columns = torch.tensor(pairs).T.to(logits.device)
    return rows, columns


class Adjustment:
    """The logit changes of one sequence. Owns the counts of its committed tokens, each added with :meth:`count`."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        bias = sampling.logit_bias
        self._bias = (
            (torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)) if bias else None
        )
        self._penalties = _TokenCounts(sampling, prompt) if _penalised(sampling) else None
        self._phrases = _Phrases(sampling.bad_words) if any(len(words) > 1 for words in sampling.bad_words) else None
        self._allowed = _always_allowed(sampling, vocab_size)

    @classmethod
    def of(cls, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> Adjustment | None:
        """None if the request does not change its logits."""
        bans = sampling.bad_words or sampling.allowed_token_ids is not None
        if not (bans or sampling.logit_bias or _penalised(sampling)):
            return None
        return cls(sampling, prompt, vocab_size)

    @property
    def by_path(self) -> bool:
        """Whether the changes depend on a row's path."""
        return self._penalties is not None or self._phrases is not None

    def count(self, token: int) -> None:
        """A token was committed to the output."""
        if self._penalties is not None:
            self._penalties.add(token)

    def edits(self, text: Sequence[int], paths: Sequence[Path]) -> LogitEdits:
        """The changes at these nodes. text: the committed tokens. paths: one for each node."""
        return LogitEdits(
            bias=self._bias,
            penalties=None if self._penalties is None else self._penalties.on(paths),
            allowed=self._allowed,
            banned=[] if self._phrases is None else self._phrases.banned(text, paths),
        )


def _penalised(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def _always_allowed(sampling: SamplingParams, vocab_size: int) -> Tensor | None:
    """int32[1, ceil(V / 32)]: tokens that are not banned everywhere; None if no token is."""
    words = [words[0] for words in sampling.bad_words if len(words) == 1]
    if not words and sampling.allowed_token_ids is None:
        return None
    allowed = torch.full((1, vocab_size), sampling.allowed_token_ids is None)
    allowed[0, list(sampling.allowed_token_ids or ())] = True
    allowed[0, words] = False
    return packed(allowed)


class _TokenCounts:
    """How often each token seen so far is in the output. Tokens of the prompt have count 0, if they count at all."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        self._factors = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        distinct = sorted(set(prompt)) if sampling.repetition_penalty != 1.0 else []
        self._index = {token: at for at, token in enumerate(distinct)}
        self._ids, self._counts = torch.tensor(distinct, dtype=torch.int64), torch.zeros(len(distinct))

    def add(self, token: int) -> None:
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            room = torch.zeros(max(64, at))
            self._ids, self._counts = torch.cat((self._ids, room.long())), torch.cat((self._counts, room))
        self._ids[at] = token
        self._counts[at] += 1.0

    def on(self, paths: Sequence[Path]) -> Penalties:
        """The penalties at nodes with these paths, counted as in plain decoding."""
        found = [(row, token, path.count(token)) for row, path in enumerate(paths) for token in dict.fromkeys(path)]
        known = {token: self._count_of(token) for token in {token for _, token, _ in found}}
        rows, tokens = (torch.tensor([each[part] for each in found], dtype=torch.int64) for part in (0, 1))
        times = torch.tensor([known[token] + times for _, token, times in found])
        seen = slice(len(self._index))
        return Penalties(self._ids[seen], self._counts[seen], rows, tokens, times, *self._factors)

    def _count_of(self, token: int) -> float:
        at = self._index.get(token)
        return 0.0 if at is None else float(self._counts[at])


class _Phrases:
    """Bans the last token of a phrase wherever the text ends with the tokens before it."""

    def __init__(self, phrases: Iterable[Sequence[int]]) -> None:
        self._by_end: dict[int, list[tuple[list[int], int]]] = {}
        for *start, last in phrases:
            if start:
                self._by_end.setdefault(start[-1], []).append((start, last))
        self._longest = max(len(start) for start, _ in chain(*self._by_end.values()))

    def banned(self, text: Sequence[int], paths: Sequence[Path]) -> list[tuple[int, int]]:
        """Rows, and tokens that may not follow there."""
        tail, found = list(text[-self._longest :]), list[tuple[int, int]]()
        for row, path in enumerate(paths):
            before = [*tail, *path]
            ends = self._by_end.get(before[-1], ())
            found += [(row, last) for start, last in ends if before[-len(start) :] == start]
        return found


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The path of every node of a tree, in the order of the nodes; paths leave the root out."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return paths
