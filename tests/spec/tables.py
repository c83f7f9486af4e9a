"""A language model that is a table, for an engine whose every other part is the real one (tests/spec/harness.py).

The logits after a text are a row of a random table, picked by a hash of the whole text. The verifier keeps that hash in
its KV rows, one per position, and reads its context from nowhere else: a row in the wrong slot, a page of another text
or a row that nobody moved changes the hash, and with it every token from there on.
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import msgspec
import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PagePool, PageTable, store_rows
from foresay.spec.accept import accept
from foresay.spec.adjust import LogitEdits, edit_logits
from foresay.spec.protocols import FeatureRequest, Forward, Rows, Verified
from foresay.spec.request import FinishReason
from foresay.spec.sample import gumbel_row, sample
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.model.config import KVShape
from tests.poison import poison_store
from tests.spec.grammars import Automaton
from tests.spec.laws import reference_adjust, reference_draw

_START = 1
_noise = lru_cache(maxsize=10_000)(gumbel_row)


class TableModel:
    """Logits by text. broken: a token after which the logits are NaN."""

    def __init__(self, seed: int, vocab_size: int = 32, spread: float = 2.0, broken: int | None = None) -> None:
        self.vocab_size, self.broken = vocab_size, broken
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(997, vocab_size, generator=generator) * spread

    @staticmethod
    def state(tokens: Sequence[int], state: int = _START) -> int:
        """The hash of a text; small enough to be exact in float64."""
        for token in tokens:
            state = (state * 31 + token + 7) % 2_147_483_647
        return state

    def logits(self, states: Sequence[int], last: Sequence[int]) -> Tensor:
        """fp32[N, V]: the rows after texts with these hashes, which end with these tokens."""
        rows = self.table[[state % len(self.table) for state in states]]
        rows[[token == self.broken for token in last]] = torch.nan
        return rows


@dataclass(frozen=True)
class Plain:
    """What a request must answer."""

    tokens: list[int]
    finish_reason: FinishReason
    stop_token: int | None = None


def chosen(
    model: TableModel,
    text: list[int],
    prompt_length: int,
    sampling: SamplingParams,
    stops: Container[int],
    noise: Tensor,
    grammar: Automaton | None = None,
) -> int | None:
    """The token that follows a text; None if none is allowed. grammar: its state before the output."""
    logits = model.logits([model.state(text)], text[-1:])[0]
    prompt, output = text[:prompt_length], text[prompt_length:]
    allowed: Container[int] = range(model.vocab_size)
    if grammar is not None:
        allowed = grammar.allowed(reduce(lambda state, token: grammar.after(token, state), output, 1))
    if sampling != _plain_sampling(sampling) or grammar is not None:
        logits = reference_adjust(logits, sampling, prompt, output, allowed)
    if len(output) < sampling.min_tokens:
        logits[[token for token in range(model.vocab_size) if token in stops]] = -torch.inf
    if bool((logits == -torch.inf).all()):
        return None
    return reference_draw(logits, sampling, noise)


def _plain_sampling(sampling: SamplingParams) -> SamplingParams:
    """The same without anything that changes logits."""
    bare = SamplingParams()
    fields = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words")
    changes = {field: getattr(bare, field) for field in (*fields, "allowed_token_ids")}
    return msgspec.structs.replace(sampling, **changes)


def plain(
    model: TableModel,
    prompt: list[int],
    sampling: SamplingParams,
    eos: Sequence[int] = (),
    max_model_len: int = 128,
    grammar: Automaton | None = None,
) -> Plain:
    """Decoding as a loop of ten lines: no pages, no trees, no batch."""
    assert sampling.seed is not None
    limit = len(prompt) + sampling.max_tokens if sampling.max_tokens else max_model_len
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    text = list(prompt)
    while True:
        noise = _noise(sampling.seed, len(text), model.vocab_size)
        token = chosen(model, text, len(prompt), sampling, stops, noise, grammar)
        if token is None:
            return Plain(text[len(prompt) :], "error")
        text.append(token)
        if token in stops and len(text) - len(prompt) > sampling.min_tokens:
            return Plain(text[len(prompt) :], "stop", token)
        if len(text) == limit:
            return Plain(text[len(prompt) :], "length")


def sampled_at(rows: Rows, logits: Tensor) -> list[int]:
    """The sample at each node. logits: fp32[N, V]."""
    assert rows.sampling is not None and rows.noise is not None
    noise = None if rows.sampling.greedy else torch.stack([rows.noise.row(position) for position in rows.positions])
    tokens: list[int] = sample(logits, rows.sampling, noise).tolist()
    return tokens


class TableVerifier:
    """Implements :class:`foresay.spec.protocols.Verifier`, proves that it gets the right rows, and keeps all
    passes."""

    def __init__(self, model: TableModel, pool: PagePool, max_positions: int) -> None:
        self.model, self.vocab_size, self.max_positions = model, model.vocab_size, max_positions
        self.store = KVStore(pool, [KVShape(1, 1, 1)], torch.float64)
        self.passes: list[list[Rows]] = []
        self._last: Forward | None = None

    def run(self, rows: Sequence[Rows], features: FeatureRequest | None = None) -> Forward:
        """One pass: what nobody may read is NaN, the rows' hashes are written, the wanted logits returned."""
        assert len({id(part.table) for part in rows}) == len(rows) > 0
        assert features is None
        self.passes.append(list(rows))
        poison_store(self.store)
        wanted: list[tuple[int, int]] = []
        starts = [0]
        for part in rows:
            first = {"none": len(part.tokens), "last": len(part.tokens) - 1, "all": 0}[part.logits]
            wanted += self._write(part)[first:]
            starts.append(len(wanted))
        logits = self.model.logits([state for state, _ in wanted], [token for _, token in wanted])
        self._last = Forward(logits, starts, {})
        return self._last

    def _write(self, rows: Rows) -> list[tuple[int, int]]:
        """Store the rows of one sequence; returns hash and token of each."""
        table, tokens = rows.table, list(rows.tokens)
        assert rows.base == table.length == self.store.filled(table), "the target has all committed KV"
        self._prove_private(table, rows.base + len(tokens))
        context = self._read(table)
        states: list[int] = []
        for row, token in enumerate(tokens):
            path = self._path(rows, row)
            assert rows.base + len(path) < self.max_positions, "a row past the end of the model"
            states.append(self.model.state([token], states[path[-1]] if path else context))
        data = torch.tensor([states, tokens], dtype=torch.float64)[..., None, None]
        store_rows(*self.store.layer(0)[:2], table.slots(rows.base, rows.base + len(tokens)), *data)
        return list(zip(states, tokens, strict=True))

    @staticmethod
    def _path(rows: Rows, row: int) -> list[int]:
        """The rows of the same pass that a row sees, itself left out."""
        if rows.words is None:
            return list(range(row))
        assert rows.nodes is not None
        assert list(rows.nodes) == list(range(len(rows.tokens)))
        assert rows.words[row] >> row == 1, "an ancestor word ends with the node itself"
        return [node for node in range(row) if rows.words[row] >> node & 1]

    def _prove_private(self, table: PageTable, stop: int) -> None:
        assert stop <= table.capacity, "rows without pages"
        size = table.pool.page_size
        for page in table.pages[table.length // size : table.pool.pages_for(stop)]:
            assert table.pool.references(page) == 1, "writing into a page that others read"

    def _read(self, table: PageTable) -> int:
        """The hash of the committed text, which every one of its rows must agree with."""
        slots = table.slots(0, table.length)
        tokens, states = (part[slots].flatten().tolist() for part in self.store.layer(0)[1::-1])
        state = _START
        for token, found in zip(tokens, states, strict=True):
            assert token == token, "a committed row that was never written"
            state = self.model.state([int(token)], state)
            assert state == found, "a row of another text"
        return state

    def verify(self, edits: Sequence[LogitEdits | None]) -> list[Verified | None]:
        """Sequence by sequence."""
        assert self._last is not None
        parts = zip(self.passes[-1], map(self._last.of, range(len(edits))), edits, strict=True)
        return [
            None if rows.tree is None else self._verify(rows, rows.tree, logits, edit) for rows, logits, edit in parts
        ]

    def _verify(self, rows: Rows, tree: DraftTree, logits: Tensor, edits: LogitEdits | None) -> Verified:
        logits = logits[-len(tree) :]
        if edits is not None:
            edit_logits(logits, edits)
        sampled = sampled_at(rows, logits)
        path, base = accept(tree, sampled), rows.base + len(rows.tokens) - len(tree)
        slots = rows.table.slots(base, base + len(tree))
        self.store.move(slots[path], slots[: len(path)])
        return sampled, path

    def committed(self, table: PageTable, path: Sequence[int] = (), advanced: int = 0) -> None:
        """All of the text is there."""
        self.store.mark(table, table.length)


class Guesser:
    """Implements :class:`foresay.spec.protocols.Drafter` and proves what it gets.

    Each level holds the token that will really be sampled with probability ``skill`` (as long as the level above did),
    and random tokens below random parents for the rest. Trees are numbered in a random order.
    """

    name = "guesser"
    needs: FeatureRequest | None = None

    def __init__(self, model: TableModel, skill: float, seed: int = 0, full: bool = False) -> None:
        self.model, self.skill, self.full = model, skill, full
        self.rng = random.Random(seed)
        self.over: list[str] = []
        self._trees: dict[str, DraftTree] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """Trees that fill their shapes, or (without ``full``) are smaller now and then."""
        trees = [self._tree(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]
        self._trees |= {sequence.id: tree for sequence, tree in zip(sequences, trees, strict=True)}
        return trees

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        table = sequence.table
        assert not sequence.pending
        assert 0 < shape.levels <= sequence.most_levels
        assert table.capacity >= table.length + shape.nodes
        tokens, parents = [sequence.tokens[-1]], [-1]
        level, right, text = [0], 0, list(sequence.tokens)
        for width in shape.widths if self.full else shape.widths[: self.rng.randint(0, shape.levels)]:
            truth = self._truth(sequence, text) if right >= 0 and self.rng.random() < self.skill else None
            children = self._children(level, width, None if truth is None else (right, truth))
            level = list(range(len(tokens), len(tokens) + len(children)))
            parents += [parent for parent, _ in children]
            tokens += [token for _, token in children]
            right = -1 if truth is None else level[children.index((right, truth))]
            text += [] if truth is None else [truth]
        return self._renumbered(tokens, parents)

    def _truth(self, sequence: SequenceState, text: list[int]) -> int | None:
        """The token that will be sampled after ``text``."""
        output = len(text) - sequence.prompt_length
        if sequence.forced is not None and output < len(sequence.forced):
            return sequence.forced[output]
        grammar = None if sequence.constraint is None else sequence.constraint.constraint
        grammar = grammar if isinstance(grammar, Automaton) else None  # of others it knows nothing
        noise = sequence.noise.row(len(text))
        return chosen(self.model, text, sequence.prompt_length, sequence.sampling, sequence.stop_ids, noise, grammar)

    def _children(self, level: list[int], width: int, right: tuple[int, int] | None) -> list[tuple[int, int]]:
        children = set() if right is None else {right}
        while len(children) < min(width, self.model.vocab_size * len(level)):
            children.add((self.rng.choice(level), self.rng.randrange(self.model.vocab_size)))
        return self.rng.sample(sorted(children), len(children))

    def _renumbered(self, tokens: list[int], parents: list[int]) -> DraftTree:
        order, left = [0], set(range(1, len(tokens)))
        while left:
            order.append(self.rng.choice([node for node in sorted(left) if parents[node] in order]))
            left.remove(order[-1])
        numbers = {node: number for number, node in enumerate(order)} | {-1: -1}
        return DraftTree.build([tokens[node] for node in order], [numbers[parents[node]] for node in order], self.name)

    def extend(self, sequence: SequenceState) -> None:
        """A chunk that did not reach the root."""
        assert sequence.pending
        assert sequence.id not in self._trees

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """The path must be the text that was committed."""
        tree = self._trees.pop(sequence.id, None)
        start = sequence.table.length - len(path)
        assert sequence.table.length == len(sequence.tokens) - 1
        own = path[: path.index(-1)] if -1 in path else path
        assert set(path[len(own) :]) <= {-1}
        tokens = [sequence.tokens[start]] if tree is None else [tree.tokens[node] for node in own]
        assert tokens == sequence.tokens[start : start + len(own)]
        assert sequence.constraint is not None or own == path

    def finished(self, sequence: SequenceState) -> None:
        """Called once at the end, and at each preemption."""
        self.over.append(sequence.id)
        self._trees.pop(sequence.id, None)
