"""A head is tried at load: does it guess a plain text as a head of this target would?

The target reads the text once. A head of another model is hardly ever right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvpaging import PagePool, PageTable
from verifier.paged_model import PagedModel

#: Below this share of right first guesses a head hardly belongs to its target; chance is far below it.
LEAST_AGREEMENT = 0.2
#: Plain text of the kind that any model continues well.
TRIAL = (
    "Once upon a time there was a king who had three sons. The first was strong and the second was clever, but the "
    "third was so simple that nobody thought he would ever come to anything. One day the king said to them: whoever "
    "brings me the most beautiful bird in the world shall have the kingdom when I am dead."
)


def tried(guess: Callable[[PageTable, Tensor], str], verifier: PagedModel, pool: PagePool, target: Path) -> str:
    """Why a head seems not to be this target's, in words for the banner; "" if it seems to be.

    guess: makes the words, of a page table with room for the text and its tokens, int64[R]. target: the target's
    directory, whose tokenizer makes them. Without two that the target has nothing is tried.
    """
    file = target / "tokenizer.json"
    if not file.exists():
        return ""
    most = min(verifier.max_positions, (pool.num_pages - 1) * pool.page_size)
    known = [token for token in Tokenizer.from_file(str(file)).encode(TRIAL).ids if token < verifier.vocab_size]
    tokens = torch.tensor(known[:most])
    if len(tokens) < 2:
        return ""
    table = PageTable(pool)
    table.reserve(len(tokens))
    try:
        return guess(table, tokens)
    finally:
        table.release()


def in_words(hits: Tensor) -> str:
    """What to say of so many right first guesses, bool[R]; "" where they are enough."""
    if hits.float().mean() >= LEAST_AGREEMENT:
        return ""
    return f"{agrees(hits)} (it may be made for another model, or read other layers)"


def agrees(hits: Tensor) -> str:
    """The share of right first guesses, in a sentence."""
    return f"its first guess agrees with the target on {share(hits)} of a plain text"


def share(hits: Tensor) -> str:
    """The same as a number."""
    return f"{float(hits.float().mean()):.0%}"
