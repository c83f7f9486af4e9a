"""What the budget chooses, without a machine's noise: ``python -m bench.counted --traces DIR``.

The texts of ``bench.budget``, looked up by the suffix drafter alone, in seconds counted from a curve of costs that
``bench.budget`` measured (``--record``, the newest by default): so what is compared are choices, and nothing else. The
budget beside fixed lengths, in sums over all rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bench import record
from bench.budget import FORCED
from bench.lookups import FOREVER, sequence_of
from bench.texts import Asked, workloads
from drafters.suffix.drafter import SuffixDrafter
from server.resolved import BUNDLED
from spec.budget import StepCost
from spec.budget.budget import Budget
from spec.budget.members import Member
from spec.budget.mixed import shares_of
from spec.sequence import Sequence as Running
from spec.step import Verdict, Work
from spec.trace import StepTrace
from spec.tree import MAX_NODES, DraftTree, TreeShape

#: What a step of the budget is told beside its verdict, when it is not timed.
_UNTIMED = StepTrace(number=0, rows=0, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=0, seconds={})


class Counted:
    """One way of drafting, request by request. levels: of every draft; None leaves it to a budget."""

    def __init__(self, cost: StepCost, levels: int | None) -> None:
        self._cost, self._levels = cost, levels
        self._drafter = SuffixDrafter(slice_seconds=FOREVER)
        self._budget = None if levels else Budget([Member.looking(self._drafter)], cost, timed=False)
        self._table = cost.expected(MAX_NODES)
        self._requests = 0

    def seconds(self, asked: Sequence[Asked], salt: str) -> float:
        """What the answers of a round take, behind the first token of each."""
        return sum(self._answer(prompt, output, salt) for prompt, output in asked)

    def _answer(self, prompt: list[int], output: list[int], salt: str) -> float:
        self._requests += 1
        sequence = sequence_of(self._requests, prompt)
        sequence.salt, sequence.limit = salt, len(prompt) + len(output)
        self._drafter.extend(sequence)
        sequence.tokens.append(output[0])
        seconds = 0.0
        while sequence.output_length < len(output):
            context, rows = len(sequence.tokens), self._step(sequence, output[sequence.output_length :])
            seconds += self._table[rows] + self._cost.behind(rows, context)
        sequence.finish_reason = "length"
        if self._budget is not None:
            self._budget.ended(sequence)
        self._drafter.finished(sequence)
        return seconds

    def _step(self, sequence: Running, coming: list[int]) -> int:
        """One step of a text that goes on like this; how many rows it had."""
        shape, tree = self._drafted(sequence)
        accepted = tree.accepted(coming)
        emitted = coming[: accepted + 1]
        sequence.tokens.extend(emitted)
        if self._budget is not None:
            depths = list(range(1, len(tree)))
            work = Work(sequence, 0, shape)
            self._budget.stepped(_UNTIMED, [Verdict(work, tree, emitted=emitted, accepted=accepted, depths=depths)])
        return len(tree)

    def _drafted(self, sequence: Running) -> tuple[TreeShape, DraftTree]:
        if self._budget is None:
            shape = TreeShape.chain(min(self._levels or 0, sequence.most_levels))
            return shape, self._drafter.propose([sequence], [shape])[0]
        (shape,) = self._budget.plan([sequence])
        found = [share.tree for share in shares_of(shape) if share.tree is not None]
        return shape, found[0] if found else DraftTree.chain(sequence.tokens[-1:])


def newest() -> Path | None:
    """The last record of ``bench.budget`` that says what context adds."""
    records = sorted(record.RESULTS.glob("*-budget.json"), reverse=True)
    return next((file for file in records if "token_of_context_us" in measured(file)), None)


def measured(file: Path) -> dict[str, Any]:
    """The costs of a record."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")).get("measured", {})
    return found


def curve(file: Path) -> StepCost:
    """The steps' costs of a record."""
    costs = measured(file)
    rows, steps = zip(*costs["step_ms"], strict=True)
    context = [(rows, us / 1e6) for rows, us in costs["token_of_context_us"]]
    return StepCost(rows, [ms / 1000 for ms in steps], context, costs.get("branching_ms", 0.0) / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.counted", description="What the budget chooses, without noise."
    )
    parser.add_argument("--traces", type=Path, help="directory of recorded texts")
    parser.add_argument("--record", type=Path, default=newest(), help="of bench.budget, for its costs (the newest)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer; of edits, three times as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", nargs="+", type=int, default=[4, 8, 16], help="of the fixed lengths")
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args()
    if args.record is None:
        parser.error("there is no record of bench.budget: name one with --record, or run it first")
    target = BUNDLED / "target"  # the inflated one has its vocabulary and its room, unless told otherwise
    config = json.loads((target / "config.json").read_text("utf-8"))
    vocab, room = config["vocab_size"], config["max_position_embeddings"]
    texts = workloads(args.traces, target, args.tokens, args.seed, vocab, room)
    result: dict[str, dict[str, float]] = {}
    for name in (name for name in FORCED if name in texts and name != "fresh"):
        ways = {"auto": Counted(curve(args.record), None)}
        ways |= {f"suffix:{levels}": Counted(curve(args.record), levels) for levels in args.levels}
        rounds = list(islice(texts[name], args.rounds))
        spent = {
            way: sum(counted.seconds(asked, f"{name}/{turn}") for turn, asked in enumerate(rounds))
            for way, counted in ways.items()
        }
        result[name] = {way: seconds / spent["auto"] for way, seconds in spent.items() if way != "auto"}
    rows = [[name, *(f"{ratio:.3f}" for ratio in ratios.values())] for name, ratios in result.items()]
    record.table(
        f"auto over fixed lengths, {args.rounds} rounds", ["texts", *(f"suffix:{n}" for n in args.levels)], rows
    )
    record.finish(
        "counted",
        {"record": args.record.name, "rounds": args.rounds, "tokens": args.tokens, "auto_over": result},
        not args.no_save,
    )


if __name__ == "__main__":
    main()
