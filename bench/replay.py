"""What lookup drafters would have had accepted in texts that are written already: ``python -m bench replay FILE ...``.

A text does not depend on who drafts, so this is exact and runs no target: at each root the drafter proposes, the text
says what is accepted, and the next root is one past that. FILE holds ``{"prompt_token_ids": [...], "output_token_ids":
[...]}`` a line. ``--record FILE`` writes such texts first: those of a target, drafted for as ``--draft`` says.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import BadOption, prompts, record
from bench.drive import LOOKUPS, sized
from bench.texts import Exchange, requests
from foresay.kvpaging import PagePool, PageTable
from foresay.server.engine_process.local import Engine
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.protocols import Drafter
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

MODES = [f"{name}:{length}" for name in LOOKUPS for length in (2, 4, 8)]
#: Of a file: requests, and tokens of an answer. Tokens of a prompt that a step reads.
MOST, LONGEST, CHUNK = 10_000, 100_000, 256


def options(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="texts")
    parser.add_argument("--modes", nargs="+", default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write texts here first, and replay them")
    parser.add_argument("--target", default=str(BUNDLED / "target"), help="directory of the one that writes them")
    parser.add_argument("--draft", default="auto", help="who drafts meanwhile")
    parser.add_argument("--prompts", type=Path, help="jsonl: own format, MT-bench, GSM8K or HumanEval")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)


def main(args: Namespace) -> dict[str, Any]:
    if args.record is not None:
        write(args)
    files = [*args.files, *([] if args.record is None else [args.record])]
    exchanges = [one for file in files for one in requests(file, MOST, LONGEST) if one[1]]
    if not exchanges:
        raise BadOption("there is no text: name a FILE, or --record one")
    counts = {mode: looked_up(mode, exchanges) for mode in args.modes}
    rows = [
        (mode, 1 + accepted / max(steps, 1), drafted / max(steps, 1), accepted / max(drafted, 1))
        for mode, (steps, drafted, accepted) in counts.items()
    ]
    record.table(f"{len(exchanges)} texts", ("draft", "tokens per step", "drafted per step", "accepted"), rows)
    return {"texts": len(exchanges), "steps, drafted, accepted": counts}


def write(args: Namespace) -> None:
    """Append the target's answers to ``--record``."""
    with Engine(args.target, args.draft) as engine, args.record.open("a", encoding="utf-8") as file:
        for seed, ids in enumerate(prompts.encoded(Path(args.target), args.prompts, args.limit).values()):
            done = engine.generate(ids, max_tokens=args.max_tokens, temperature=args.temperature, seed=seed)
            file.write(json.dumps({"prompt_token_ids": ids, "output_token_ids": done.token_ids}) + "\n")


def looked_up(mode: str, exchanges: Iterable[Exchange]) -> tuple[int, int, int]:
    """Steps after the prompts', tokens drafted in them, and accepted. One lookup drafter reads all texts in turn, since
    some look at earlier answers."""
    name, length = sized(mode)
    if name not in LOOKUPS or not length.isdecimal():
        raise BadOption(f"{mode!r}: expected a drafter that needs no model and its length, such as ngram:4")
    drafter, shape, sums = LOOKUPS[name](), TreeShape.chain(int(length)), [0, 0, 0]
    for prompt, output in exchanges:
        sequence = _sequence(prompt, len(prompt) + len(output))
        for _ in range(len(prompt) // CHUNK):
            drafter.extend(sequence)
        sequence.tokens.append(output[0])  # that of the step which reads the prompt's end; it drafts nothing
        while left := output[len(sequence.tokens) - len(prompt) :]:
            tree = _proposed(drafter, shape, sequence)
            accepted = tree.accepted(left[: max(tree.depths) + 1])
            sums = [have + more for have, more in zip(sums, (1, len(tree) - 1, accepted), strict=True)]
            sequence.tokens.extend(left[: accepted + 1])
        sequence.finish_reason = "stop"
        drafter.finished(sequence)
    return sums[0], sums[1], sums[2]


def _proposed(drafter: Drafter, shape: TreeShape, sequence: SequenceState) -> DraftTree:
    """The tree at this root, at most as deep as could be emitted."""
    limited = shape.limited(sequence.most_levels)
    return drafter.propose([sequence], [limited])[0] if limited.levels else DraftTree.chain([sequence.tokens[-1]])


def _sequence(prompt: list[int], limit: int) -> SequenceState:
    """A text, as far as a lookup drafter needs it. limit: its tokens, prompt and all."""
    return SequenceState(
        id="replayed", tokens=list(prompt), prompt_length=len(prompt), sampling=SamplingParams(),
        table=PageTable(PagePool(2)), noise=Noise(0, 1), limit=limit, stop_ids=frozenset(),
    )  # fmt: skip
