"""What lookup drafters have accepted on texts that are known: ``python -m bench.lookups --traces DIR``.

Every drafter walks through the same requests, in order, beside the exhaustive rightmost-longest match: of all places in
the text so far and in earlier answers, the one with most tokens of context in common, 16 at most, and of those the last
one. Counts only, but for the last table: CPU time of the suffix drafter at a given length of history.

DIR holds ``*.jsonl`` of ``{"prompt_token_ids" or "input_token_ids": [...], "output_token_ids": [...]}``, and ``*.json``
of tool-calling dialogues (a list of ``{"traj": [{"role": ..., "content": ..., "tool_calls": ...}]}``), which are
tokenised; each message of the assistant is a request.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench import record
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.drafters.suffix.history import History
from foresay.kvpaging import PagePool, PageTable
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.noise import Noise
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.spec.walk import Walk

#: A prompt and what was answered.
Asked = tuple[list[int], list[int]]
FOREVER = 1e9
SHAPES = ("4", "8", "16", "4,4,3,3,2")


class Exhaustive:
    """The rightmost-longest match with a cap of 16, by the last place of every context of 1 to 16 tokens."""

    name, needs = "rightmost-longest", None

    def __init__(self) -> None:
        self._answers: list[int] = []
        self._of_answers: dict[tuple[int, ...], int] = {}
        self._own: dict[tuple[int, ...], int] = {}
        self._read = 0

    def propose(self, sequences: list[SequenceState], shapes: list[TreeShape]) -> list[DraftTree]:
        """A chain for the one sequence."""
        (sequence,), (shape,) = sequences, shapes
        text = sequence.tokens
        _index(self._own, text, self._read, len(text))
        self._read = len(text)
        drafted: list[int] = []
        for size in range(min(16, len(text)), 0, -1):
            known, context = None, tuple(text[-size:])
            for places, where in ((self._own, text), (self._of_answers, self._answers)):
                if known is None and (known := places.get(context)) is not None:
                    drafted = where[known : known + shape.levels]
            if drafted:
                break
        return [DraftTree.chain([text[-1], *drafted], self.name)]

    def extend(self, sequence: SequenceState) -> None: ...

    def committed(self, sequence: SequenceState, path: list[int], moves: Any) -> None: ...

    def finished(self, sequence: SequenceState) -> None:
        """Keep the answer."""
        begin = len(self._answers)
        self._answers += [*sequence.tokens[max(0, sequence.prompt_length - 16) :], -1]
        _index(self._of_answers, self._answers, begin, len(self._answers))
        self._own, self._read = {}, 0


def _index(places: dict[tuple[int, ...], int], text: list[int], begin: int, end: int) -> None:
    for place in range(begin, end):
        for size in range(1, min(16, place) + 1):
            places[tuple(text[place - size : place])] = place


def requests(file: Path, most: int, longest: int) -> Iterator[Asked]:
    """The first requests of a file; of their answers the first ``longest`` tokens."""
    if file.suffix == ".jsonl":
        for line in file.read_text("utf-8").splitlines()[:most]:
            row = json.loads(line)
            yield row.get("prompt_token_ids") or row["input_token_ids"], row["output_token_ids"][:longest]
        return
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    for dialogue in json.loads(file.read_text("utf-8"))[:most]:
        prompt: list[int] = []
        for message in dialogue["traj"]:
            calls = [call["function"] for call in message.get("tool_calls") or []]
            said = f"{message['role']}\n{message.get('content') or ''}{json.dumps(calls) if calls else ''}\n"
            tokens = tokenizer.encode(said, add_special_tokens=False).ids
            if message["role"] == "assistant":
                yield prompt, tokens[:longest]
            prompt = prompt + tokens


def sequence_of(number: int, prompt: list[int]) -> SequenceState:
    """A request as far as a lookup drafter looks at it."""
    return SequenceState(
        id=str(number),
        tokens=list(prompt),
        prompt_length=len(prompt),
        sampling=SamplingParams(),
        table=PageTable(PagePool(2)),
        noise=Noise(0, 1),
        limit=1 << 30,
        stop_ids=frozenset(),
    )


def walked(drafter: Drafter, shape: TreeShape, asked: list[Asked]) -> tuple[int, int, int]:
    """Steps, drafted and accepted tokens of all requests, one after the other."""
    steps = drafted = accepted = 0
    for number, (prompt, output) in enumerate(asked):
        walk = Walk(drafter, shape, sequence_of(number, prompt))
        walk.begin([])
        walk.follow([*prompt, *output], over=True)
        walk.close()
        steps += len(walk.trace.per_step_drafted)
        drafted += sum(walk.trace.per_step_drafted)
        accepted += sum(walk.trace.per_step_accepted)
    return steps, drafted, accepted


def compare(name: str, asked: list[Asked]) -> dict[str, Any]:
    """The table of one file."""
    makers: dict[str, Callable[[], Any]] = {
        "rightmost-longest": Exhaustive,
        "ngram": NgramDrafter,
        "suffix": lambda: SuffixDrafter(slice_seconds=FOREVER),
    }
    rows, found = [], {}
    for text in SHAPES:
        shape = TreeShape.parse(text) if "," in text else TreeShape.chain(int(text))
        against = None
        for kind, make in makers.items():
            if kind != "suffix" and not shape.is_chain:
                continue
            steps, drafted, accepted = walked(make(), shape, asked)
            against = against or (drafted, accepted)
            found[f"{kind}:{text}"] = {"steps": steps, "drafted": drafted, "accepted": accepted}
            share = (f"{accepted / against[1]:.3f}", f"{drafted / against[0]:.3f}") if shape.is_chain else ("", "")
            rows.append([kind, text, f"{1 + accepted / steps:.3f}", drafted, accepted, *share])
    columns = ["drafter", "shape", "tokens/step", "drafted", "accepted", "accepted, times", "drafted, times"]
    record.table(f"{name}, {len(asked)} requests, {sum(len(o) for _, o in asked)} tokens", columns, rows)
    return found


def costs(asked: list[Asked], length: int) -> dict[str, float]:
    """CPU time with so much history: the answers in order, over and over with other tokens, until there are enough."""
    rng, tokens = random.Random(0), [token for prompt, output in asked for token in (*prompt[-200:], *output)]
    drafter = SuffixDrafter(History(4 * length, 4 * length), slice_seconds=FOREVER)
    text = tokens[:length] + [rng.choice(tokens) for _ in range(length - len(tokens))]
    drafter.history.add("", text)
    begun = time.thread_time()
    drafter.history.behind[0].take(length)
    taking = (time.thread_time() - begun) / length
    times: list[float] = []
    for number, (prompt, output) in enumerate(asked[-20:]):
        running = sequence_of(number, prompt)
        drafter.propose([running], [TreeShape.chain(8)])
        for token in output[:200]:
            running.tokens.append(token)
            begun = time.thread_time()
            drafter.propose([running], [TreeShape.chain(8)])
            times.append(time.thread_time() - begun)
    times.sort()
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {"take_us": 1e6 * taking} | {f"propose_{n}_us": 1e6 * times[int(p * len(times))] for n, p in places.items()}


def main() -> None:
    """Print the tables, then one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.lookups", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=25, help="requests, or dialogues, of each file (25)")
    parser.add_argument("--longest", type=int, default=6000, help="tokens of an answer (6000)")
    parser.add_argument("--history", type=int, default=100_000, help="tokens at which time is measured (100000)")
    args = parser.parse_args()
    files = sorted(file for file in args.traces.iterdir() if file.suffix in (".json", ".jsonl"))
    found: dict[str, Any] = {}
    for file in files:
        asked = list(requests(file, args.limit, args.longest))
        found[file.stem] = compare(file.stem, asked) | (spent := costs(asked, args.history))
        record.table(f"{file.stem}, CPU time, us", list(spent), [[f"{value:.1f}" for value in spent.values()]])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
