"""Sequences for lookup drafters: a token is a letter."""

from __future__ import annotations

from collections.abc import Iterable

from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import Drafter
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def sequence(text: str | Iterable[int], name: str = "one", prompt: int = 1, salt: str = "") -> SequenceState:
    return SequenceState(
        id=name,
        tokens=letters(text) if isinstance(text, str) else list(text),
        prompt_length=prompt,
        sampling=SamplingParams(),
        table=PageTable(PagePool(2)),
        noise=Noise(0, 128),
        limit=1 << 30,
        stop_ids=frozenset(),
        salt=salt,
    )


def draft(drafter: Drafter, running: SequenceState, shape: TreeShape) -> DraftTree:
    """What is drafted for one sequence; its root is the last token."""
    (tree,) = drafter.propose([running], [shape])
    assert tree.tokens[0] == running.tokens[-1]
    return tree


def proposed(drafter: Drafter, running: SequenceState, levels: int = 4) -> str:
    """The chain behind the root, as letters."""
    tree = draft(drafter, running, TreeShape.chain(levels))
    assert tree.is_chain
    return "".join(map(chr, tree.tokens[1:]))


def answered(drafter: Drafter, text: str, name: str = "earlier", prompt: int = 1, salt: str = "") -> None:
    """A request that was answered to its end."""
    over = sequence(text, name, prompt, salt)
    over.finish_reason = "stop"
    drafter.finished(over)
