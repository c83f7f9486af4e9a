"""What structured output costs: ``python -m bench.grammar [--tokenizer FILE | --train TEXT ... --vocab 49152]``.

Random JSON schemas, each compiled and then written along a random way that it allows. At every token the masks of the
committed text, of a chain and of a tree are taken, for the first time, as the first request with a schema meets them.
Beside the clock stands the processor time, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import record
from bench.schemas import schemas
from bench.stats import percentile
from foresay.server.settings.resolved import BUNDLED
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.grammars.constraint import LlguidanceConstraint
from foresay.server.text.grammars.schema import schema_grammar
from foresay.spec.request import Grammar

DEFAULT = BUNDLED / "target" / "tokenizer.json"
END = 0
#: Parents of the trees whose masks are taken: the committed text alone, a chain of 8 drafts, a tree of 15.
TREES = {
    "one node": [-1],
    "chain of 8": list(range(-1, 8)),
    "tree of 15": [-1, 0, 0, 0, 1, 1, 1, 2, 2, 4, 4, 5, 7, 9, 9, 13],
}

T = TypeVar("T")


class Times:
    """Milliseconds of one kind of work: clock and processor."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []

    def of(self, work: Callable[[], T]) -> T:
        """Do it and note how long it took."""
        clock, processor = time.perf_counter(), time.process_time()
        result = work()
        self.processor.append(1e3 * (time.process_time() - processor))
        self.clock.append(1e3 * (time.perf_counter() - clock))
        return result

    def summary(self) -> dict[str, float]:
        """Median, p95, largest."""
        kinds = {"clock": self.clock, "cpu": self.processor}
        points = {"p50": 50.0, "p95": 95.0, "max": 100.0}
        return {f"{kind}_{name}": percentile(ms, at) for kind, ms in kinds.items() for name, at in points.items()}


def trained(texts: list[Path], vocab: int) -> str:
    """A byte-level BPE tokenizer of ``vocab`` tokens, made from texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train([str(path) for path in texts], trainer)
    return str(backend.to_str())


class Writer:
    """Writes along random ways. text: the tokenizer. Each kind of tree has automata that no other has warmed."""

    def __init__(self, text: str, vocab: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._guide = GrammarCompiler(text, vocab, [END])
        self._compilers = {name: GrammarCompiler(text, vocab, [END]) for name in TREES}
        self.compiling = Times()
        self.masks = {name: Times() for name in TREES}
        self.tokens = self.forced = 0

    def write(self, grammar: Grammar, most: int) -> None:
        """One answer of at most ``most`` tokens."""
        guide = self._guide.compile(grammar)
        timed = {
            name: self.compiling.of(partial(compiler.compile, grammar)) for name, compiler in self._compilers.items()
        }
        last = END
        for _ in range(most):
            for name, parents in TREES.items():
                tokens = self._tree(guide, last, parents)
                self.masks[name].of(partial(timed[name].masks, tokens, parents))
            self.forced += bool(guide.forced(1))
            last = self._token(guide)
            if last == END:
                return
            self.tokens += 1
            for constraint in (guide, *timed.values()):
                constraint.advance([last])

    def _token(self, constraint: LlguidanceConstraint) -> int:
        """One that may follow; the end half of the times when it may."""
        mask = constraint.masks([END], [-1])
        assert mask is not None, "a grammar has begun"
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        return END if END in allowed and self._random.random() < 0.5 else int(self._random.choice(allowed))

    def _tree(self, guide: LlguidanceConstraint, root: int, parents: list[int]) -> list[int]:
        """Tokens for a tree in which all may be there, until the text ends."""
        tokens, states = [root], [guide.fork()]
        for parent in parents[1:]:
            state = states[parent].fork()
            tokens.append(self._token(state))
            state.advance(tokens[-1:])
            states.append(state)
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grammar", description="What structured output costs.")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (default: the bundled pair's)")
    parser.add_argument("--train", type=Path, nargs="+", help="texts to train a tokenizer on instead")
    parser.add_argument("--vocab", type=int, default=49152, help="how many tokens that has")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--most", type=int, default=100, help="tokens per answer")
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args()
    text = trained(args.train, args.vocab) if args.train else (args.tokenizer or DEFAULT).read_text(encoding="utf-8")
    vocab = Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True)
    writer = Writer(text, vocab, seed=0)
    for schema in schemas(args.schemas):
        writer.write(Grammar(text=schema_grammar(schema, "schema"), param="schema"), args.most)
    rows = {"compile": writer.compiling.summary()} | {name: times.summary() for name, times in writer.masks.items()}
    title = f"{args.schemas} schemas, {vocab} tokens: milliseconds to compile, and for the masks of a whole tree"
    record.table(title, ["", *next(iter(rows.values()))], [[name, *row.values()] for name, row in rows.items()])
    share = writer.forced / max(writer.tokens, 1)
    print(f"{share:.0%} of {writer.tokens} tokens were forced")
    counts = {"schemas": args.schemas, "vocab_size": vocab, "tokens": writer.tokens, "forced_share": share}
    record.finish("grammar", {**counts, "ms": rows}, not args.no_save)


if __name__ == "__main__":
    main()
