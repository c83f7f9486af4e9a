"""What the budget chooses, without a machine's noise: ``python -m bench.counted --traces DIR``.

The texts of ``bench.budget``, in seconds counted from costs: of steps by their rows as ``bench.budget`` measured them
(``--record``, the newest by default) or as ``--step-ms 1:8.0 64:53 ..`` says, and of a draft model by ``--draft-ms
START LEVEL ROW``. So what is compared are choices, and nothing else. The drafters are real, suffix and the bundled
draft model; the texts are recorded or drawn by the bundled target beforehand, which no choice changes. The budget
beside fixed ways, in sums over all rounds; ``short`` are drawn answers of half the length, by budgets that have seen
none before.
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
from bench.drive import Options, build, request, run
from bench.lookups import FOREVER
from bench.texts import Asked, workloads
from foresay.drafters.combined import CombinedDrafter
from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.routed import configured
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import Member
from foresay.spec.budget.plan import Plan
from foresay.spec.engine import Engine
from foresay.spec.names import DRAFT_MODEL, SUFFIX
from foresay.spec.noise import Noise
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.step import DraftsByPlan, ScheduledSequence, VerifyResult
from foresay.spec.trace import StepTrace
from foresay.spec.tree import MAX_NODES, ROOT_ONLY, DraftTree, TreeShape

#: What a step of the budget is told beside its result, when it is not timed.
_UNTIMED = StepTrace(number=0, rows=0, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=0, seconds={})
#: Workloads that the target draws, of which the last is of short answers.
_DRAWN = ("drawn", "again", "short")
#: What the budget is compared with.
FIXED = ("suffix:4", "suffix:8", "suffix:16", "draft_model:2", "draft_model:4", "draft_model:3,2,1")
#: Milliseconds that a draft model takes if nobody says: a compiled pass of the bundled one beside a 135M target.
_DRAFT = (0.15, 0.28, 0.03)


class Counted:
    """One way of drafting, request by request. way: ``auto``, ``none``, ``suffix:8`` or ``draft_model:3,2,1``. model:
    the draft model, if there is one, on the pages of ``pool``; draft: what it costs."""

    def __init__(
        self,
        cost: CostModel,
        way: str,
        model: DraftModelDrafter | None = None,
        draft: DraftCost | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self._cost, self._draft, self._model = cost, draft or DraftCost(), model
        self._pool = pool or PagePool(2)
        name, _, size = way.partition(":")
        self._shape = TreeShape.parse(size if "," in size else ",".join("1" * int(size or 0))) if size else ROOT_ONLY
        suffix = SuffixDrafter(slice_seconds=FOREVER)
        self._budget: Budget | None = None
        self._drafter: Drafter | None = {SUFFIX: suffix, DRAFT_MODEL: model}.get(name)
        if name == "auto":
            models = [] if model is None else [Member.model(model, self._draft)]
            self._budget = Budget([*models, Member.looking(suffix)], cost, timed=False)
            self._drafter = CombinedDrafter(self._budget)
        self._table = cost.table(1, 0, MAX_NODES)
        self._requests = 0

    def seconds(self, asked: Sequence[Asked], salt: str, seed: int = 0) -> float:
        """What the answers of a round take, behind the first token of each."""
        return sum(self._answer(prompt, output, salt, seed) for prompt, output in asked)

    def _answer(self, prompt: list[int], output: list[int], salt: str, seed: int) -> float:
        self._requests += 1
        sampling = SamplingParams(temperature=1.0, seed=seed)
        vocab = 1 if self._model is None else self._model.model.vocab_size
        sequence = SequenceState(
            id=f"{self._requests}",
            tokens=list(prompt),
            prompt_length=len(prompt),
            sampling=sampling,
            table=PageTable(self._pool),
            noise=Noise(seed, vocab),
            limit=len(prompt) + len(output),
            stop_ids=frozenset(),
            salt=salt,
        )
        if self._model is not None:
            sequence.table.reserve(len(prompt))
            sequence.table.commit(len(prompt))
        seconds = 0.0
        if self._drafter is not None:
            for _ in range(0, len(prompt), MAX_NODES):
                self._drafter.extend(sequence)
        sequence.tokens.append(output[0])
        while sequence.output_length < len(output):
            seconds += self._step(sequence, output[sequence.output_length :])
        sequence.finish_reason = "length"
        if self._budget is not None:
            self._budget.ended(sequence)
        if self._drafter is not None:
            self._drafter.finished(sequence)
        sequence.table.release()
        return seconds

    def _step(self, sequence: SequenceState, coming: list[int]) -> float:
        """Seconds of one step of a text that goes on like this."""
        context, unread = len(sequence.tokens), 0 if self._model is None else self._model.unread(sequence) - 1
        plan = Plan(shape=self._shape.limited(sequence.most_levels))
        if self._budget is not None:
            (plan,) = self._budget.plan([sequence])
        tree = DraftTree.chain(sequence.tokens[-1:])
        if self._model is not None:
            sequence.table.reserve(MAX_NODES)
        if plan.shares and isinstance(self._drafter, DraftsByPlan):
            (tree,) = self._drafter.draft([sequence], [plan])
        elif plan.shape.levels and self._drafter is not None:
            (tree,) = self._drafter.propose([sequence], [plan.shape])
        accepted = tree.accepted(coming)
        emitted = coming[: accepted + 1]
        sequence.tokens.extend(emitted)
        path = _path(tree, emitted[:accepted])
        if self._model is not None:
            sequence.table.commit(len(path))
        if self._drafter is not None:
            self._drafter.committed(sequence, path)
        sequence.table.trim()
        if self._budget is not None:
            result = VerifyResult(
                ScheduledSequence(sequence, 0, plan.shape, plan=plan),
                tree,
                emitted=emitted,
                accepted=accepted,
                depths=path[1:],
            )
            self._budget.stepped(_UNTIMED, [result])
        seconds = self._table[len(tree)] + self._cost.behind(len(tree), context)
        for part in tree.parts or (tree,):
            if part.drafter == DRAFT_MODEL:
                levels = part.levels
                seconds += self._draft.seconds(levels, max(0, min(len(part), len(tree)) - 1 - levels) + unread)
        return seconds


def _path(tree: DraftTree, accepted: list[int]) -> list[int]:
    """The root and the nodes of the tokens that were accepted."""
    path, tokens, parents = [0], tree.tokens.tolist(), tree.parents.tolist()
    for token in accepted:
        path.append(next(n for n in range(1, len(tokens)) if (parents[n], tokens[n]) == (path[-1], token)))
    return path


def newest() -> Path | None:
    """The last record of ``bench.budget`` that says what context adds."""
    records = sorted(record.RESULTS.glob("*-budget.json"), reverse=True)
    return next((file for file in records if "token_of_context_us" in measured(file)), None)


def measured(file: Path) -> dict[str, Any]:
    """The costs of a record."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")).get("measured", {})
    return found


def curve(file: Path) -> CostModel:
    """The steps' costs of a record."""
    costs = measured(file)
    rows, steps = zip(*costs["step_ms"], strict=True)
    context = [(rows, us / 1e6) for rows, us in costs["token_of_context_us"]]
    return CostModel(rows, [ms / 1000 for ms in steps], context)


def drawn(engine: Engine, prompts: list[Asked], length: int, seed: int) -> list[Asked]:
    """What the target answers."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True)
    known = {tuple(prompt): run(engine, request(prompt, params)).tokens for prompt, _ in prompts}
    return [(prompt, known[tuple(prompt)]) for prompt, _ in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.counted", description="What the budget chooses, without noise."
    )
    parser.add_argument("--traces", type=Path, help="directory of recorded texts")
    parser.add_argument("--record", type=Path, default=newest(), help="of bench.budget, for its costs (the newest)")
    parser.add_argument("--step-ms", nargs="+", metavar="ROWS:MS", help="costs of steps, in the place of a record's")
    parser.add_argument("--draft-ms", nargs=3, type=float, default=_DRAFT, metavar=("START", "LEVEL", "ROW"))
    parser.add_argument("--workloads", nargs="+", choices=[*FORCED, *_DRAWN], default=[*FORCED, *_DRAWN])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer; of edits, three times as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", nargs="+", default=FIXED, help=f"ways to compare with: {' '.join(FIXED)}")
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args()
    if args.step_ms:
        rows, ms = zip(*(point.split(":") for point in args.step_ms), strict=True)
        costs = [int(one) for one in rows], [float(one) / 1000 for one in ms]
    elif args.record is None:
        parser.error("there is no record of bench.budget: name one with --record, run it first, or give --step-ms")
    engine = build(f"{DRAFT_MODEL}:1", Options("bundled", str(BUNDLED / "draft"), kv_tokens=4096))
    target = BUNDLED / "target"  # the inflated one has its vocabulary and its room, unless told otherwise
    texts = workloads(args.traces, target, args.tokens, args.seed, engine.info.vocab_size, engine.info.max_model_len)
    texts["short"] = texts["drawn"]
    result: dict[str, dict[str, float]] = {}
    for name in (name for name in args.workloads if name in texts):
        rounds = list(islice(texts[name], args.rounds))
        if name in _DRAWN:
            length = args.tokens // 2 if name == "short" else args.tokens
            rounds = [drawn(engine, asked, length, args.seed + turn) for turn, asked in enumerate(rounds)]
        spent = {}
        for way in ("auto", "none", *args.fixed):
            spent[way] = 0.0
            for turn, asked in enumerate(rounds):
                if not turn or (name == "short" and turn % 4 == 0):
                    cost = CostModel(*costs) if args.step_ms else curve(args.record)
                    draft = DraftCost(*(ms / 1000 for ms in args.draft_ms))
                    counted = Counted(cost, way, draft_model(engine), draft, engine.pool)
                spent[way] += counted.seconds(asked, f"{name}/{turn}", args.seed + turn)
        result[name] = {way: seconds / spent["auto"] for way, seconds in spent.items() if way != "auto"}
    shown = [[name, *(f"{ratio:.3f}" for ratio in ratios.values())] for name, ratios in result.items()]
    record.table(f"auto over other ways, {args.rounds} rounds", ["texts", "none", *args.fixed], shown)
    told = {"record": args.record.name if args.record and not args.step_ms else "", "step_ms": args.step_ms}
    told |= {"draft_ms": args.draft_ms, "rounds": args.rounds, "tokens": args.tokens, "auto_over": result}
    record.finish("counted", told, not args.no_save)


def draft_model(engine: Engine) -> DraftModelDrafter:
    """The engine's draft model, of which nothing is known yet."""
    drafter: Any = configured(engine.drafter)
    return DraftModelDrafter(drafter.model)


if __name__ == "__main__":
    main()
