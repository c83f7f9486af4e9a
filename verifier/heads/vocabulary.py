"""The tokens that a head drafts if an output matrix over all tokens would cost more than its layer: the recent ones.

A tokenizer's ids are in the order of its merges, that is, of frequency in its training text. So, apart from language
and
subject, the first ids are the likeliest. Tokens of prompts and answers replace the least recently used ones::

    next to be replaced   ..  id 32,767  ..  id 0    the ends of texts    tokens used, the latest last

The rows of the target's matrix for these tokens are copied, so that a product reads only them.
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

#: The size of the drafted vocabulary; a vocabulary of less than twice this size is drafted whole.
DRAFTED = 1 << 15


def drafted(target: ModelConfig) -> int:
    """How many of the target's tokens are drafted: fewer than all only on a CPU with a float output matrix."""
    floats = target.tie_word_embeddings or target.quantization is None
    return DRAFTED if floats and target.vocab_size >= 2 * DRAFTED else target.vocab_size


class DraftVocabulary:
    """Some of a target's tokens on a CPU, with the output matrix for them.

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
        """None if all tokens are drafted."""
        count = drafted(target.config)
        whole = count == target.config.vocab_size or target.device.type != "cpu"
        return None if whole else cls(target, count)

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """[N, H]: the rows of the target's output matrix for these tokens."""
        packed, _ = self._target.head.packed
        if isinstance(packed, PackedFloats):
            return packed.rows(tokens)
        return self._target.embedding[tokens]

    def __contains__(self, token: int) -> bool:
        """Whether it can be drafted now."""
        return token in self._rows

    def emitted(self, tokens: Iterable[int]) -> None:
        """Tokens among these that are missing replace the least recently used ones."""
        for token in tokens:
            if token not in self._rows:
                _, row = self._rows.popitem(last=False)
                self._rows[token], self.token_ids[row] = row, token
                self._packed.replace(row, self._rows_of(torch.tensor([token]))[0])
            self._rows.move_to_end(token)
