"""What a drafter without a model would have had accepted on a text that is known.

A text does not depend on who drafts it (promise 1), and a drafter that looks things up in the text needs nothing else
to draft. So its steps can be replayed exactly: at each root it proposes, the text says what is accepted, and the next
root is one past that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foresay.spec.protocols import Drafter
from foresay.spec.sequence import SequenceState
from foresay.spec.trace import SequenceTrace
from foresay.spec.tree import DraftTree, TreeShape


class Walk:
    """One sequence as it would go with another drafter, some tokens behind what is known of it.

    sequence: whose output it is. The drafter is shown a copy alone, from the prompt on, since the sequence itself may
    be ahead of the walk. shape: what is asked for in each step. trace: the steps so far. begun: tokens, prompt
    included, before the first of them; None until :meth:`begin`.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape, sequence: SequenceState) -> None:
        self.trace = SequenceTrace()
        self.begun: int | None = None
        self._drafter, self._shape = drafter, shape
        # What an engine before wrote is prompt to this one's steps.
        begin = sequence.prompt_length + sequence.resumed_at
        self._copy = replace(sequence, tokens=sequence.tokens[:begin], prompt_length=begin)
        self._tree: DraftTree | None = None

    def read(self) -> None:
        """A chunk of the prompt was computed."""
        self._drafter.extend(self._copy)

    def begin(self, first: Sequence[int]) -> None:
        """The prompt is computed. first: the beginning of the output that came with it, which no drafter drafts."""
        self._copy.tokens.extend(first)
        self.begun = self.length

    @property
    def length(self) -> int:
        """Tokens that its steps so far have emitted, with the prompt."""
        return len(self._copy.tokens)

    @property
    def emitted(self) -> int:
        """Tokens of the output so far, those that came with the prompt included."""
        return self.length - self._copy.prompt_length

    @property
    def steps(self) -> int:
        """Steps so far, the one that computed the prompt included, if it emitted anything."""
        with_prompt = self.begun is not None and self.begun > self._copy.prompt_length
        return len(self.trace.per_step_drafted) + with_prompt

    def follow(self, tokens: Sequence[int], over: bool = False) -> None:
        """Take all steps that ``tokens`` (the prompt and what is known of the output) decide. over: no more will come,
        so that what is not there was not written."""
        copy = self._copy
        while self.length < len(tokens):
            tree = self._tree = self._tree or self._proposed()
            known = tokens[self.length : self.length + max(tree.depths) + 1]
            if len(known) <= max(tree.depths) and not over:
                return
            accepted = tree.accepted(known)
            emitted = known[: accepted + 1]
            self.trace.record(tree.depths[1:], accepted, len(emitted))
            copy.tokens.extend(emitted)
            self._tree = None

    def cut(self, length: int) -> None:
        """The text ended with its token number ``length``, prompt included: steps may have gone past that."""
        surplus = self.length - length
        if surplus > 0:
            self.trace.cut(surplus)
            del self._copy.tokens[length:]

    def close(self) -> None:
        """The text is whole: drop what the drafter keeps of the sequence alone."""
        self._copy.finish_reason = self._copy.finish_reason or "stop"
        self._drafter.finished(self._copy)

    def _proposed(self) -> DraftTree:
        """The tree at this root, as deep as could be emitted."""
        shape = self._shape.limited(self._copy.most_levels)
        if not shape.levels:
            return DraftTree.chain([self._copy.tokens[-1]])
        return self._drafter.propose([self._copy], [shape])[0]
