"""Some of a drafter's tokens, on a CPU, with the output matrix for only these.

Of a draft model with 152,000 tokens the output matrix can be a third of what a pass reads, and most of its rows are
never drafted. Which rows are kept follows what is said::

    at first     the first ids (tokenizers number byte pairs by how often they occur) and the ends of texts
    then         each committed token, of prompts too, replaces the least recently used one
    a text       of which too many tokens were missing lately is drafted with the whole matrix

The rows are copied in packed form, so a kept token has the bits that it has in the whole matrix. FR-Spec
(arXiv:2502.14856) cuts heads to a fixed list by frequency; here the list is the user's own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight

#: The share of a text's tokens that may be missing, and over how many tokens it is a moving average.
MOST_MISSING, WINDOW = 1 / 64, 128


@dataclass(slots=True)
class _Text:
    """seen: how many of its tokens are known. missing: the share of missing ones among its last."""

    seen: int = 0
    missing: float = 0.0


class DraftVocabulary:
    """token_ids: int64[N], the target's id of each token; changes in place. head: H to N. adaptive: whether a text may
    be drafted with the whole matrix instead."""

    def __init__(
        self, whole: Linear, count: int, ends: Iterable[int] = (), ids: Tensor | None = None, adaptive: bool = True
    ) -> None:
        """whole: H to V. ends: tokens that end texts. ids: int64[V], the target's id of each of its rows; None: their
        index."""
        packed, was = whole.packed
        assert not isinstance(packed, BlockedWeight), "on a CPU"
        self._whole = packed
        named = torch.arange(packed.outer) if ids is None else ids.cpu()
        self._of = None if ids is None else {token: row for row, token in enumerate(named.tolist())}
        late = {self._row(token) for token in ends} - {None, *range(count)}
        chosen = torch.tensor([*range(count - len(late)), *sorted(row for row in late if row is not None)])
        self.token_ids = named[chosen]
        self._packed = packed.select_rows(chosen)
        self.head, self.adaptive = Linear.from_packed(self._packed, was, whole.dtype), adaptive
        order = (*reversed(range(count - len(late))), *range(count - len(late), count))
        self._rows = OrderedDict((int(self.token_ids[row]), row) for row in order)
        self._texts: dict[str, _Text] = {}

    @staticmethod
    def supports(whole: Linear) -> bool:
        """Whether it can be made of a matrix: only on a CPU, of a layout whose rows are apart."""
        packed, _ = whole.packed
        return not isinstance(packed, BlockedWeight) and packed.rows_apart

    def restrict(self, decoder: Decoder) -> Decoder:
        """The same model with logits of only these tokens."""
        made = copy.copy(decoder)
        made.head = self.head
        return made

    def __contains__(self, token: int) -> bool:
        """Whether it can be drafted now."""
        return token in self._rows

    def covers(self, text: str) -> bool:
        """Whether to draft with it for this text."""
        found = self._texts.get(text)
        return not self.adaptive or found is None or found.missing <= MOST_MISSING

    def observe(self, text: str, tokens: Sequence[int], prompt: int) -> None:
        """All tokens of a text so far; the first ``prompt`` ones were not the target's choice."""
        known = self._texts.setdefault(text, _Text())
        for token in tokens[max(known.seen, prompt) :]:
            known.missing += ((token not in self._rows) - known.missing) / WINDOW
        fresh, known.seen = tokens[known.seen :], len(tokens)
        self._keep(list(dict.fromkeys(reversed(fresh)))[: len(self._rows)][::-1])

    def drop_text(self, text: str) -> None:
        """Forget a text."""
        self._texts.pop(text, None)

    def _row(self, token: int) -> int | None:
        """A token's row of the whole matrix; None if it has none."""
        if self._of is None:
            return token if 0 <= token < self._whole.outer else None
        return self._of.get(token)

    def _keep(self, tokens: Iterable[int]) -> None:
        """Each token once, the last one last."""
        replaced: dict[int, int] = {}
        for token in tokens:
            if token not in self._rows:
                if (source := self._row(token)) is None:
                    continue
                _, row = self._rows.popitem(last=False)
                self._rows[token], self.token_ids[row], replaced[row] = row, token, source
            self._rows.move_to_end(token)
        if replaced:
            self._packed.replace(torch.tensor([*replaced]), self._whole, torch.tensor([*replaced.values()]))
