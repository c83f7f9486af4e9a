"""Passes and whole steps of the large models, over the bytes that they must read; and the effect of switches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import chain
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.drive import request, together
from bench.engines import PUBLISHED, PUBLISHED_DFLASH, PUBLISHED_INT8, Bench, Pair, texts
from bench.gpu import plan
from bench.gpu.drafting import Steps, rows_proposer
from bench.gpu.worker import Task
from foresay.spec.names import DRAFT_MODEL, EAGLE3, NGRAM, NONE
from foresay.spec.tree import TreeShape
from foresay.verifier.ops.kernels.linear import Tile


def bench_of(task: Task, name: str, random: bool = False) -> Bench:
    """A model of this process by its name, made on first use. random: all of its weights."""
    key, chosen = (name, random or task.settings.random), task.settings
    if key not in task.kept:
        task.kept[key] = Bench(task.device, chosen.pairs[name], chosen.positions, key[1])
    made: Bench = task.kept[key]
    return made


def read(task: Task) -> float:
    """Bytes per second, as probed in this run."""
    return float(task.lines.last("bandwidth") or "nan")


def timed(task: Task, bench: Bench, rows: int, context: int, least: int = 3) -> dict[str, Any]:
    """A step of so many rows, over its floor. least: steps that are timed."""
    found = steps_of(task, bench, rows, context).timed(task.settings.patience, least)
    return over(task, found, bench.read_by_step(NONE, 0, context, rows))


def steps_of(task: Task, bench: Bench, rows: int, context: int) -> Steps:
    """Steps of so many rows."""
    return Steps(task.device, bench.target, rows_proposer(rows, task.device.torch), context, task.settings.block)


def over(task: Task, found: dict[str, Any], needed: float) -> dict[str, Any]:
    """The same with its floor, in seconds, and the ratio to it. needed: bytes that it must read."""
    floor = needed / read(task)
    return found | {"floor": floor, "over_floor": found["value"] / floor}


def passes(task: Task, bench: Bench | None = None) -> None:
    """Steps of some rows of the model in the step's name, or of this one. "... passes": also of many rows, of one row
    at longer contexts, and many of one row."""
    name, chosen, all_of_them = task.name.removesuffix(" passes"), task.settings, task.name.endswith(" passes")
    bench, (first, *longer) = bench or bench_of(task, name, random=not all_of_them), chosen.contexts
    sizes = [(rows, first) for rows in chosen.rows if rows <= 16 or all_of_them]
    found: dict[tuple[int, int], Any] = {}
    for rows, context in (*sizes, *((1, context) for context in longer if all_of_them)):
        made_with = {"model": name, "rows": rows, "context": context}
        found[rows, context] = task.take("pass", "s", timed, task, bench, rows, context, **made_with)
    most, far = max(chosen.rows), longer[-1]
    one, many, long = (found.get(size) for size in ((1, first), (most, first), (1, far)))
    if one and many:
        task.take("over one row", "times", lambda: many / one, model=name, rows=most)
    if one and long:
        task.take("a token of context", "ns", lambda: 1e9 * (long - one) / (far - first), model=name, to=far)
    if chosen.steps and all_of_them:
        task.take("steady", "s", timed, task, bench, 1, first, chosen.steps, model=name, rows=1, context=first)


def whole(task: Task) -> None:
    """Whole steps, plain and with each drafter of the pair, at T = 0 and 1."""
    name, chosen = task.name.removesuffix(" steps"), task.settings
    bench, context = bench_of(task, name, random=chosen.pairs[name].dflash is not None), chosen.contexts[0]

    def step(drafter: str, shape: TreeShape, at: float) -> dict[str, Any]:
        proposer = bench.proposer(drafter, shape) or rows_proposer(1, task.device.torch)
        steps = Steps(task.device, bench.target, proposer, context, chosen.block, at)
        needed = bench.read_by_step(drafter, shape.levels, context, shape.nodes)
        return over(task, steps.timed(chosen.patience), needed)

    found: dict[tuple[str, str, float], float] = {}
    for at in (0.0, 1.0):
        for drafter, tree in drafts_of(task, bench.pair):
            shape = TreeShape.parse(tree) if tree else TreeShape()
            made_with = {"model": name, "drafter": drafter, "tree": tree, "temperature": at, "context": context}
            found[drafter, tree, at] = task.take("whole step", "s", step, drafter, shape, at, **made_with)
    cold, warm = (found[NONE, "", at] for at in (0.0, 1.0))
    if cold and warm:
        task.take("T = 1 over T = 0", "times", lambda: warm / cold, model=name)


def drafts_of(task: Task, pair: Pair) -> list[tuple[str, str]]:
    """The drafters and trees of whole steps: a chain of EAGLE-3's, one of a draft model's, a tree of it; or, beside a
    DFlash head's block, chains of an EAGLE-3 head and of the same in int8."""
    eagle, draft = (",".join("1" * levels) for levels in task.settings.levels)
    if pair.dflash is None:
        return [(NONE, ""), (PUBLISHED, eagle), (DRAFT_MODEL, draft), (DRAFT_MODEL, task.settings.tree)]
    block = ",".join("1" * (pair.dflash.block - 1))
    return [(NONE, ""), (PUBLISHED_DFLASH, block), (PUBLISHED, eagle), (PUBLISHED_INT8, eagle)]


def prompts(task: Task) -> None:
    """Time to the first token of prompts of so many tokens, as in a server: in chunks, each captured."""
    bench, alphabet = bench_of(task, "8B"), texts(1)[0]
    engine = bench.engine(NONE, "", True, 2 * task.settings.prompts[-1])

    def first(length: int) -> dict[str, Any]:
        taken = []
        for number in range(4):  # the first one of a length is not counted
            prompt = [*(alphabet * length)[: length - 1], alphabet[number]]
            begun = time.perf_counter()
            together(engine, [request(prompt, 1)])
            taken.append(time.perf_counter() - begun)
        return {"value": median(taken[1:])}

    for length in task.settings.prompts:
        task.take("first token", "s", first, length, model="8B", prompt=length)


#: Constants that are read at launches: module, name, values besides the default, rows of the step; the best come first.
SWITCHES: tuple[tuple[str, str, tuple[Any, ...], int], ...] = (
    ("kernels.pdl", "PDL", (False,), 1), ("kernels.linear", "AHEAD", (0, 1, 4), 1),
    ("kernels.linear", "SMALL", ((Tile(16), Tile(32), Tile(64, 128, warps=8, stages=3)),), 64),
    ("kernels.tree_attention", "DEPTH", (4,), 1), ("kernels.key_blocks", "SPLIT", (4, 16), 64),
    ("kernels.tree_attention", "FINE_TILED", (4096,), 64), ("kernels.linear", "EARLY", (True,), 1),
    ("attention", "ROTATED_WITHIN", (True,), 1), ("attention", "SLOTS_ONCE", (True,), 64),
)  # fmt: skip


def switched() -> Iterator[tuple[str, str, Any, int]]:
    """Each value except the default."""
    for module, constant, values, rows in SWITCHES:
        name = f"foresay.verifier.ops.{module}"
        served = vars(import_module(name))[constant]
        yield from ((name, constant, value, rows) for value in values if value != served)


def ablation(task: Task) -> None:
    """The 8B's step by default and with each switch, in turns, captured anew after each. over: its time over the
    default's."""
    bench, patience = bench_of(task, "8B"), task.settings.patience
    served: dict[int, Steps] = {}

    def tried(module: str, constant: str, value: Any, rows: int) -> dict[str, Any]:
        if rows not in served:
            served[rows] = steps_of(task, bench, rows, task.settings.contexts[0])
        with patch.object(import_module(module), constant, value):
            steps = steps_of(task, bench, rows, task.settings.contexts[0])
        before, found, after = (each.timed(patience)["value"] for each in (served[rows], steps, served[rows]))
        return {"value": found, "served": (before + after) / 2, "over": 2 * found / (before + after)}

    for module, constant, value, most in list(switched())[task.kept.get("switches", slice(None))]:
        rows, name = min(most, task.settings.rows[-1]), f"{module.rpartition('.')[2]}.{constant}"
        task.take("switched", "s", tried, module, constant, value, rows, constant=name, to=str(value), rows=rows)


#: What is compared with plain decoding in eager mode: the drafter, the tree, captured or not, the texts in the order of
#: their arrival, and after how many steps each arrives. Text 3 is long.
Way = tuple[str, str, bool, tuple[int, ...], int]
WAYS: tuple[Way, ...] = (
    (NONE, "", True, (0,), 0),
    (NONE, "", True, (3,), 0),
    (DRAFT_MODEL, "1,1,1,1", True, (0,), 0),
    (EAGLE3, "1,1,1,1,1", True, (0, 3), 8),
    (DRAFT_MODEL, "3,2,1", True, (0,), 0),
    (DRAFT_MODEL, "1,1,1,1", True, (0, 1, 2), 5),
    (NGRAM, "1,1,1,1", True, (0,), 0),
    (DRAFT_MODEL, "3,2,1", False, (0, 1, 2), 0),
)


def same(task: Task, bench: Bench | None = None, ways: Sequence[Way] = WAYS, **of: str) -> None:
    """The same tokens with any drafter and any kind of launch, alone or with other requests. of: for the lines."""
    bench, tokens, prompts = bench or bench_of(task, "8B"), task.settings.tokens, texts(3)
    prompts.append([*chain.from_iterable(prompts * 9)][: task.settings.long])
    longest = min(1024, task.settings.positions // 2)

    def written(name: str, tree: str, graphs: bool, those: Sequence[int], apart: int) -> dict[str, Any]:
        engine = bench.engine(name, tree, graphs, longest, len(those))
        runs = [together(engine, [request(prompts[one], tokens, at) for one in those], apart) for at in (0.0, 1.0)]
        rates = [first.statistics.decode_tokens_per_second for first, *_ in runs]
        return {"value": [[one.tokens for one in each] for each in runs], "tokens_per_second": rates}

    wanted = {text: written(NONE, "", False, (text,), 0)["value"] for text in {one for way in ways for one in way[3]}}
    for way in ways:
        context = of | dict[str, Any](zip(("drafter", "tree", "captured", "texts", "apart"), way, strict=True))
        for turn, found in enumerate(task.take("answers", "tokens", written, *way, **context) or ()):
            for text, mine in zip(way[3], found, strict=True):
                pairs = zip(mine, wanted[text][turn][0], strict=True)
                differ = [place for place, pair in enumerate(pairs) if len(set(pair)) > 1]
                made_with = context | {"temperature": float(turn), "text": text, "prompt": len(prompts[text])}
                task.check("same tokens", not differ, differ_at=differ[:1], **made_with)


def compile_ahead(task: Task) -> None:
    """Run the step in this one's name on models of few layers, without its figures. Compiled kernels are on disk then,
    and the process that measures only loads them. "ablation 1": every third switch from that one on."""
    begun, what = time.monotonic(), task.name.removeprefix("compile ")
    name, part = (what[:-2], int(what[-1])) if what.startswith("ablation") else (what, 0)
    if task.settings.compiled and name not in task.settings.compiled:
        return
    function = next(step.function for steps in plan.STEPS.values() for step in steps if step.name == name)
    chosen = task.settings.thin(9 if "steps" in name else 1)  # heads read several layers
    inner = replace(task, name=name, settings=chosen, silent=True, kept={"switches": slice(part, None, 3)})
    task.check("compiled", inner.run(function) == "held", seconds=time.monotonic() - begun)
