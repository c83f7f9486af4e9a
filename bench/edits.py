"""Edits of given texts: ``python -m bench.edits --texts README.md spec/step.py``.

Each text is the prompt and the prediction; the answer is the text with some of its words, and a fifth as many of its
lines, replaced, left out, or followed by another one. What each lookup drafter would have had accepted on it is exact,
since a text does not depend on who drafts it. Counts only; ``python -m bench.forced --edits`` times such texts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench import record
from bench.lookups import FOREVER, sequence_of
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.drafters.routed import RoutedDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.budget import CostModel
from foresay.spec.protocols import Drafter
from foresay.spec.scheduler import PREDICTED_LEVELS
from foresay.spec.tree import TreeShape
from foresay.spec.walk import Walk

#: What becomes of a word or line that is edited.
REPLACED, LEFT_OUT, FOLLOWED = range(3)


@dataclass(frozen=True, slots=True)
class Edited:
    """A text and an edit of it, as token ids."""

    name: str
    text: list[int]
    answer: list[int]


def edited(text: str, rng: random.Random, rate: float) -> str:
    """The text with a share ``rate`` of its words edited, and a fifth of that share of its lines."""
    words = _changed(text.split(" "), rng, rate)
    return "\n".join(_changed(" ".join(words).split("\n"), rng, rate / 5))


def _changed(items: Sequence[str], rng: random.Random, rate: float) -> list[str]:
    out: list[str] = []
    for item in items:
        change = rng.choice((REPLACED, LEFT_OUT, FOLLOWED)) if rng.random() < rate else None
        if change in (None, FOLLOWED):
            out.append(item)
        if change in (REPLACED, FOLLOWED):
            out.append(rng.choice(items))
    return out


def edits(paths: Sequence[Path], rate: float, tokenizer: Path, seed: int = 0, characters: int = 6000) -> list[Edited]:
    """The beginnings of files, and their edits."""
    rng, encoder = random.Random(seed), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        tokens: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return tokens

    texts = [(path.name, path.read_text("utf-8")[:characters]) for path in paths]
    return [Edited(name, ids(text), ids(edited(text, rng, rate))) for name, text in texts]


def walked(make: Callable[[], Drafter], shape: TreeShape, asked: Sequence[Edited], predicted: int | None) -> list[str]:
    """A row of the table: tokens per step, drafted tokens per step, and which share of them was accepted.

    predicted: 0 for the text that is edited, 1 for the next one; None for nothing.
    """
    steps = drafted = accepted = 0
    for number, one in enumerate(asked):
        sequence = sequence_of(number, one.text)
        sequence.prediction = None if predicted is None else asked[(number + predicted) % len(asked)].text
        walk = Walk(make(), shape, sequence)
        walk.begin(one.answer[:1])
        walk.follow([*one.text, *one.answer], over=True)
        walk.close()
        steps += len(walk.trace.per_step_drafted)
        drafted += sum(walk.trace.per_step_drafted)
        accepted += sum(walk.trace.per_step_accepted)
    return [f"{1 + accepted / steps:.2f}", f"{drafted / steps:.1f}", f"{accepted / drafted:.2f}"]


def main() -> None:
    """Print a table for each rate."""
    parser = argparse.ArgumentParser(prog="python -m bench.edits", description=__doc__)
    parser.add_argument("--texts", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rates", nargs="+", type=float, default=(0.0, 0.03, 0.1, 0.25), help="of words edited")
    parser.add_argument("--row", type=float, default=0.05, help="what a row costs, in passes without drafts (0.05)")
    args = parser.parse_args()
    cost = CostModel([1, 64], [1.0, 1.0 + 63 * args.row])
    deep, chain = TreeShape.chain(PREDICTED_LEVELS), TreeShape.chain(8)

    def suffix() -> SuffixDrafter:
        return SuffixDrafter(slice_seconds=FOREVER)

    ways: dict[str, tuple[Callable[[], Drafter], TreeShape, int | None]] = {
        "ngram, 8": (NgramDrafter, chain, None),
        "suffix, 8": (suffix, chain, None),
        "suffix, 16": (suffix, TreeShape.chain(16), None),
        "prediction": (lambda: PredictionDrafter(cost), deep, 0),
        "prediction of another text": (lambda: PredictionDrafter(cost), deep, 1),
        "prediction, then suffix": (lambda: RoutedDrafter(PredictionDrafter(cost), suffix(), chain), deep, 0),
    }
    for rate in args.rates:
        asked = edits(args.texts, rate, BUNDLED / "target")
        rows = [[name, *walked(make, shape, asked, told)] for name, (make, shape, told) in ways.items()]
        tokens = sum(len(one.answer) for one in asked)
        columns = ["drafter", "tokens/step", "drafted/step", "accepted of drafted"]
        record.table(f"{rate:.0%} of words edited, {len(asked)} texts, {tokens} tokens", columns, rows)


if __name__ == "__main__":
    main()
