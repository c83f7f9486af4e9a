"""What a mask must be, the slow way: a matcher of its own for every node, fed from the grammar's beginning."""

from __future__ import annotations

from functools import cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from foresay.server.settings.resolved import BUNDLED
from foresay.server.text.grammars.compiler import GrammarCompiler, spells, tokenizer_text, unforced
from foresay.spec.request import Grammar

TARGET = BUNDLED / "target"
SIZE, ENDS = 4096, (0, 1)
THINK, DONE = 2, 3  # special tokens of the bundled pair, in the part of <think> and </think>


@cache
def tokenizer() -> LLTokenizer:
    text = tokenizer_text(TARGET)
    assert text is not None
    return LLTokenizer(text, n_vocab=SIZE, eos_token=list(ENDS))


@cache
def compiler() -> GrammarCompiler:
    made = GrammarCompiler.load(TARGET, SIZE, ENDS)
    assert made is not None
    return made


def bits(mask: Tensor) -> np.ndarray:
    """bool[N, 32 * words]"""
    return np.unpackbits(mask.numpy().view(np.uint8), axis=-1, bitorder="little").astype(bool)


def allowed(grammar: Grammar, text: list[int]) -> set[int] | None:
    """The tokens that may follow ``text``; None if the grammar does not allow ``text``."""
    inside = grammar.after is None
    if grammar.opens is not None and text[:1] != [grammar.opens]:
        inside = True
    matcher = _matcher(grammar.text)
    for position, token in enumerate(text):
        if not inside:
            inside = token == grammar.after
        elif token in ENDS:
            return set(ENDS) if matcher.is_accepting() and position == len(text) - 1 else None
        elif not matcher.consume_token(token):
            return None
    if not inside:
        return set(range(SIZE))
    return _next(matcher) | ({grammar.opens} if grammar.opens is not None and not text else set())


def _matcher(text: str) -> LLMatcher:
    names = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    return LLMatcher(tokenizer(), unforced(text) if spells(text, names) else text, log_level=0)


def _next(matcher: LLMatcher) -> set[int]:
    accepting = matcher.is_accepting()
    if accepting and matcher.is_stopped():
        return set(ENDS)
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    found = set(np.flatnonzero(mask).tolist())
    return found if accepting else found - set(ENDS)


def accepts(text: str, output: str) -> bool:
    """Whether a grammar (as llguidance takes it) allows just this output."""
    matcher = _matcher(text)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer().tokenize_str(output)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
