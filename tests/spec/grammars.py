"""Grammars in a few lines, as :class:`foresay.spec.constrain.Constraint`: a random automaton over token ids, and odd
tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Automaton:
    """Each state allows one token (then it is forced), some, or all. Proves that it gets the truth.

    always: tokens that states which force nothing allow. forcing: how many states force one. tells: whether it says so.
    """

    def __init__(
        self, seed: int, vocab_size: int, always: Iterable[int] = (), forcing: float = 0.4, reports: bool = True
    ) -> None:
        self.seed, self.vocab_size, self.forcing, self.reports = seed, vocab_size, forcing, reports
        self.always = frozenset(always)
        self.state = 1
        self.emitted: list[int] = []
        self.calls: list[str] = []

    def allowed(self, state: int) -> list[int]:
        """The tokens that may come in a state."""
        rng = random.Random(self.seed * 1000 + state)
        kind = rng.random()
        if kind < self.forcing:
            return [rng.randrange(self.vocab_size)]
        if kind > 0.9:
            return list(range(self.vocab_size))
        return sorted({*rng.sample(range(self.vocab_size), self.vocab_size // 3), *self.always})

    def after(self, token: int, state: int) -> int:
        """The state that follows."""
        return (state * 31 + token + 7) % 101

    def states(self, tokens: list[int], parents: list[int]) -> list[int | None]:
        """The state after each node; None for one that cannot be reached."""
        states: list[int | None] = [self.state]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = states[parent]
            good = above is not None and token in self.allowed(above)
            states.append(self.after(token, above) if good and above is not None else None)
        return states

    # -- Constraint ----------------------------------------------------------------------------------------------

    def forced(self, most: int) -> list[int]:
        self.calls.append("forced")
        forced, state = [], self.state
        while self.reports and len(forced) < most and len(only := self.allowed(state)) == 1:
            forced += only
            state = self.after(only[0], state)
        return forced

    def legal(self, tokens: list[int], parents: list[int]) -> list[bool]:
        self.calls.append("legal")
        self._prove_root(tokens)
        return [state is not None for state in self.states(tokens, parents)]

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        self.calls.append("masks")
        self._prove_root(tokens)
        bits = np.zeros((len(tokens), -(-self.vocab_size // 32) * 32), dtype=np.uint8)
        for node, state in enumerate(self.states(tokens, parents)):
            assert state is not None, "illegal nodes are not verified"
            bits[node, self.allowed(state)] = 1
        return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32))

    def advance(self, tokens: list[int]) -> None:
        self.calls.append("advance")
        for token in tokens:
            assert token in self.allowed(self.state), "a token that was never allowed"
            self.state = self.after(token, self.state)
        self.emitted += tokens

    def fork(self) -> Automaton:
        other = Automaton(self.seed, self.vocab_size, self.always, self.forcing, self.reports)
        other.state, other.emitted = self.state, list(self.emitted)
        return other

    def silent(self) -> Automaton:
        """A copy that never reports what is forced: with no drafter, nothing is drafted."""
        other = self.fork()
        other.reports = False
        return other

    def _prove_root(self, tokens: list[int]) -> None:
        assert not self.emitted or tokens[0] == self.emitted[-1], "the root is the last token said"


class Odd:
    """Allows odd tokens, up to 31; forces nothing. replies: what it returns instead, by method, or raises."""

    def __init__(self, **replies: Any) -> None:
        self.replies = replies

    def forced(self, most: int) -> list[int]:
        forced: list[int] = self._reply("forced", [])
        return forced

    def legal(self, tokens: list[int], parents: list[int]) -> list[bool]:
        legal = [True]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            legal.append(legal[parent] and token % 2 == 1)
        reply: list[bool] = self._reply("legal", legal)
        return reply

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        odd = torch.tensor([0xAAAAAAAA - (1 << 32)], dtype=torch.int32)
        masks: Tensor | None = self._reply("masks", odd.repeat(len(tokens), 1))
        return masks

    def advance(self, tokens: list[int]) -> None:
        self._reply("advance", None)

    def fork(self) -> Odd:
        return self

    def _reply(self, call: str, otherwise: Any) -> Any:
        reply = self.replies.get(call, otherwise)
        if isinstance(reply, Exception):
            raise reply
        return reply
