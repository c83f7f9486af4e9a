"""Passes and whole steps of the large models, over the bytes that they must read; and the effect of switches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.drive import request, together
from bench.engines import PUBLISHED, Bench, texts
from bench.gpu import plan
from bench.gpu.drafting import Steps, rows_proposer
from bench.gpu.worker import Task
from bench.shapes import eagle_bytes, step_bytes
from foresay.spec.names import DRAFT_MODEL, EAGLE3, NGRAM, NONE
from foresay.spec.tree import TreeShape
from foresay.verifier.ops.kernels.linear import Tile


def bench_of(task: Task, name: str, random: bool = False) -> Bench:
    """The "8B" or the "1B" of this process, made on first use. random: all of its weights."""
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
    steps = steps_of(task, bench, rows, context)
    return over(task, bench, steps.timed(task.settings.patience, least), NONE, 0, context)


def steps_of(task: Task, bench: Bench, rows: int, context: int) -> Steps:
    """Steps of so many rows."""
    return Steps(task.device, bench.target, rows_proposer(rows, task.device.torch), context, task.settings.block)


def over(task: Task, bench: Bench, found: dict[str, Any], drafter: str, levels: int, context: float) -> dict[str, Any]:
    """The same with its floor, in seconds, and the ratio to it."""
    item = task.device.dtype.itemsize
    needed = step_bytes(bench.target.decoder.config, context, item)
    if drafter == PUBLISHED:
        needed += eagle_bytes(bench.pair.eagle, levels, context, item)
    if drafter == DRAFT_MODEL:
        needed += levels * step_bytes(bench.drafter(drafter).model.decoder.config, context, item)
    floor = needed / read(task)
    return found | {"floor": floor, "over_floor": found["value"] / floor}


def passes(task: Task) -> None:
    """Steps of many rows at a context of 1k, of one row at longer ones, and many of one row."""
    name, chosen, bench = task.name[:2], task.settings, bench_of(task, task.name[:2])
    first, *longer = chosen.contexts
    found: dict[tuple[int, int], Any] = {}
    for rows, context in (*((rows, first) for rows in chosen.rows), *((1, context) for context in longer)):
        made_with = {"model": name, "rows": rows, "context": context}
        found[rows, context] = task.take("pass", "s", timed, task, bench, rows, context, **made_with)
    most, far = max(chosen.rows), longer[-1]
    one, many, long = found[1, first], found[most, first], found[1, far]
    if one and many:
        task.take("over one row", "times", lambda: many / one, model=name, rows=most)
    if one and long:
        task.take("a token of context", "ns", lambda: 1e9 * (long - one) / (far - first), model=name, to=far)
    if chosen.steps:
        task.take("steady", "s", timed, task, bench, 1, first, chosen.steps, model=name, rows=1, context=first)


def whole(task: Task) -> None:
    """Whole steps: plain, a chain of EAGLE-3's, one of a draft model's, a tree of it; at T = 0 and 1."""
    name, chosen, bench = task.name[:2], task.settings, bench_of(task, task.name[:2])
    context, (eagle, draft) = chosen.contexts[0], chosen.levels

    def step(drafter: str, shape: TreeShape, at: float) -> dict[str, Any]:
        proposer = bench.proposer(drafter, shape) or rows_proposer(1, task.device.torch)
        steps = Steps(task.device, bench.target, proposer, context, chosen.block, at)
        return over(task, bench, steps.timed(chosen.patience), drafter, shape.levels, context)

    ways = {NONE: [""], PUBLISHED: [",".join("1" * eagle)], DRAFT_MODEL: [",".join("1" * draft), chosen.tree]}
    found: dict[tuple[str, str, float], float] = {}
    for at in (0.0, 1.0):
        for drafter, tree in ((drafter, tree) for drafter, trees in ways.items() for tree in trees):
            shape = TreeShape.parse(tree) if tree else TreeShape()
            made_with = {"model": name, "drafter": drafter, "tree": tree, "temperature": at, "context": context}
            found[drafter, tree, at] = task.take("whole step", "s", step, drafter, shape, at, **made_with)
    cold, warm = (found[NONE, "", at] for at in (0.0, 1.0))
    if cold and warm:
        task.take("T = 1 over T = 0", "times", lambda: warm / cold, model=name)


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


#: Constants that launchers read: module, name, values to try instead of the default, rows of the step. The most
#: important come first.
SWITCHES: tuple[tuple[str, str, tuple[Any, ...], int], ...] = (
    ("chain", "PDL", (False,), 1), ("linear", "AHEAD", (0, 1, 4), 1),
    ("linear", "SMALL", ((Tile(16), Tile(32), Tile(64, 128, warps=8, stages=3)),), 64),
    ("tree_attention", "DEPTH", (4,), 1), ("key_blocks", "SPLIT", (4, 16), 64),
)  # fmt: skip


def switched() -> Iterator[tuple[str, str, Any, int]]:
    """Each value except the default."""
    for module, constant, values, rows in SWITCHES:
        name = f"foresay.verifier.ops.kernels.{module}"
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
        rows = min(most, task.settings.rows[-1])
        name = f"{module.rpartition('.')[2]}.{constant}"
        task.take("switched", "s", tried, module, constant, value, rows, constant=name, to=str(value), rows=rows)


#: What is compared with plain decoding in eager mode: the drafter, the tree, captured or not, requests at once.
WAYS = (
    (NONE, "", True, 1),
    (DRAFT_MODEL, "1,1,1,1", True, 1),
    (EAGLE3, "1,1,1,1,1", True, 1),
    (DRAFT_MODEL, "3,2,1", True, 1),
    (DRAFT_MODEL, "1,1,1,1", True, 3),
    (NGRAM, "1,1,1,1", True, 1),
    (DRAFT_MODEL, "3,2,1", False, 3),
)


def same(task: Task, bench: Bench | None = None, ways: Sequence[tuple[str, str, bool, int]] = WAYS, **of: str) -> None:
    """The same tokens with any drafter and any kind of launch, alone or with other requests. of: for the lines."""
    bench, prompts, tokens = bench or bench_of(task, "8B"), texts(3), task.settings.tokens
    longest = min(1024, task.settings.positions // 2)

    def written(name: str, tree: str, graphs: bool, count: int) -> dict[str, Any]:
        engine = bench.engine(name, tree, graphs, longest, count)
        batches = ([request(text, tokens, at) for text in prompts[:count]] for at in (0.0, 1.0))
        firsts = [together(engine, each)[0] for each in batches]
        rates = [first.statistics.decode_tokens_per_second for first in firsts]
        return {"value": [first.tokens for first in firsts], "tokens_per_second": rates}

    wanted = written(NONE, "", False, 1)["value"]
    for way in ways:
        context = of | dict[str, Any](zip(("drafter", "tree", "captured", "requests"), way, strict=True))
        found = task.take("answers", "tokens", written, *way, **context)
        for at, mine, plain in zip((0.0, 1.0), found or (), wanted, strict=False):
            differ = [place for place, pair in enumerate(zip(mine, plain, strict=True)) if len(set(pair)) > 1]
            task.check("same tokens", not differ, temperature=at, differ_at=differ[:1], **context)


def compile_ahead(task: Task) -> None:
    """Run the step in this one's name on models of few layers, without its figures. Compiled kernels are on disk then,
    and the process that measures only loads them. "ablation 1": every third switch from that one on."""
    begun, what = time.monotonic(), task.name.removeprefix("compile ")
    name, part = (what[:-2], int(what[-1])) if what.startswith("ablation") else (what, 0)
    if task.settings.compiled and name not in task.settings.compiled:
        return
    function = next(step.function for steps in plan.STEPS.values() for step in steps if step.name == name)
    chosen = task.settings.thin(9 if "steps" in name else 1)  # a head reads several layers
    inner = replace(task, name=name, settings=chosen, silent=True, kept={"switches": slice(part, None, 3)})
    task.check("compiled", inner.run(function) == "held", seconds=time.monotonic() - begun)
