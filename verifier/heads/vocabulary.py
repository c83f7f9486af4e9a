"""The tokens that a head drafts where an output matrix of all would cost more than its layer: those said lately.

A tokenizer's ids are in the order of its merges: how often they came in what it was made of. So, language and subject
aside, the first ids are the likeliest. What is said, in prompts or answers, takes the place of what was not said for
longest::

    the next to go        ..  id 32,767  ..  id 0    the ends of texts    what was said, the last last

Rows of the target's own matrix are copied where they are needed: a product reads the few alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.kernels.cpu.linear import PackedFloats

#: Tokens that are drafted at once; a vocabulary of less than twice as many is drafted whole.
DRAFTED = 1 << 15


def drafted(target: ModelConfig) -> int:
    """How many of its tokens: on a CPU, of whose output matrix there are floats."""
    floats = target.tie_word_embeddings or target.quantization is None
    return DRAFTED if floats and target.vocab_size >= 2 * DRAFTED else target.vocab_size


class DraftVocabulary:
    """Some of a target's tokens on a CPU, and its output matrix of them.

    token_ids: int64[N], the target's id of each. head: H to N.
    """

    def __init__(self, target: Decoder, count: int) -> None:
        self._target = target
        ends = [token for token in target.config.eos_token_ids if token >= count]
        ids = [*range(count - len(ends)), *ends]
        self.token_ids = torch.tensor(ids)
        self.head = Linear(self._rows_of(self.token_ids), None, target.dtype)
        packed, _ = self.head.packed
        assert isinstance(packed, PackedFloats), "of floats, on a CPU"
        self._packed, kept = packed, count - len(ends)
        self._rows = OrderedDict((ids[row], row) for row in (*reversed(range(kept)), *range(kept, count)))

    @classmethod
    def of(cls, target: Decoder) -> DraftVocabulary | None:
        """None where all are drafted."""
        count = drafted(target.config)
        whole = count == target.config.vocab_size or target.device.type != "cpu"
        return None if whole else cls(target, count)

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """[N, H]: what the target's output matrix has of these."""
        packed, _ = self._target.head.packed
        if isinstance(packed, PackedFloats):
            return packed.rows(tokens)
        return self._target.embedding[tokens]

    def __contains__(self, token: int) -> bool:
        """Whether it can be drafted now."""
        return token in self._rows

    def said(self, tokens: Iterable[int]) -> None:
        """Those of them that are not there take the place of others."""
        for token in tokens:
            if token not in self._rows:
                _, row = self._rows.popitem(last=False)
                self._rows[token], self.token_ids[row] = row, token
                self._packed.replace(row, self._rows_of(torch.tensor([token]))[0])
            self._rows.move_to_end(token)
