"""A mask of tokens, 32 to a word, over rows of logits."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import F32, I32, Value

#: Logits that a thread takes at a time: whole words of a mask.
_COLUMNS = 4096


def keep_allowed(logits: Tensor, allowed: Tensor) -> None:
    """As :func:`foresay.verifier.ops.sample.keep_allowed`; both contiguous."""
    words = allowed.shape[1] if len(allowed) > 1 else 0
    _keeping()(logits, allowed, logits.shape[1], words, len(logits))


@Compiled
def _keeping() -> Kernel:
    k = Kernel("keep_allowed")
    width, pieces = k.number(2), (k.number(2) + (_COLUMNS - 1)) // _COLUMNS
    with k.share(k.number(4) * pieces) as unit:
        row, begin = unit // pieces, unit % pieces * _COLUMNS
        piece = k.at(k.pointer(0), row * width + begin, F32)
        words = k.at(k.pointer(1), row * k.number(3) + begin // 32, I32)

        def keep(index: Value, lanes: int) -> None:
            word, first = k.load(words, I32, index // 32), index % 32
            bits = k.spread(word) >> k.counting(first) if lanes > 1 else word >> k.integer(first, I32)
            value = k.read(piece, F32, index, lanes)
            k.store(k.select((bits & 1).differs(0), value, -float("inf")), piece, index)

        k.across(k.smallest(width - begin, _COLUMNS), keep)
    return k
