"""The README's figures, from the newest records of ``bench peers``: ``python -m bench readme``.

The parts of README.md between two marks are rewritten; a test compares them with the records.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from textwrap import fill
from typing import Any

from bench import BadOption
from bench.peers import NONE, OURS, TOGETHER
from bench.record import RESULTS

README = Path(__file__).parents[1] / "README.md"
HEADLINE, PERFORMANCE = ((f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n") for name in ("headline", "performance"))
Entry = dict[str, Any]


def newest(directory: Path = RESULTS) -> list[tuple[str, Entry]]:
    """The latest record beside peers on several kinds of prompts for each model that was served, real files before
    inflated ones and the latest first; and the latest of requests at once, if there is one."""
    found: dict[str, tuple[str, Entry]] = {}
    for file in sorted([*directory.glob("*-peers.json"), *directory.glob("*-at_once.json")], reverse=True):
        entry = json.loads(file.read_text("utf-8"))
        if "at_once" in entry or (len(entry.get("kinds", [])) > 2 and {"llama.cpp", "xllamacpp"} & entry.keys()):
            found.setdefault("" if "at_once" in entry else entry["target"], (file.name, entry))
    targets = sorted(filter(None, found), key=lambda target: not target.endswith(".gguf"))  # inflated ones last
    return [*(found[target] for target in targets), *(found[""] for _ in range("" in found))]


def on_gpu(directory: Path = RESULTS) -> tuple[str, list[Entry]]:
    """The latest record of the call A on a GPU, and its whole steps of an 8B."""
    file = max(directory.glob("*-gpu-A.jsonl"))
    lines = map(json.loads, file.read_text("utf-8").splitlines())
    return file.name, [one for one in lines if (one["step"], one["what"]) == ("8B steps", "whole step")]


def block(records: list[tuple[str, Entry]], gpu: tuple[str, list[Entry]]) -> str:
    """The text for the README."""
    (_, entry), *others = records
    parts = [_conditions(entry), _speeds(entry), "\n".join(_verdicts(entry))]
    if peers := [one for _, one in others if "kinds" in one]:
        parts.append(_beside(peers))
    parts += [_at_once(one) for _, one in others if "at_once" in one]
    parts.append(_gpu_steps(gpu[1]))
    names = ", ".join(f"`{name}`" for name in (*(name for name, _ in records), gpu[0]))
    text = f"Records, in bench/results: {names}; commands: [bench/README.md](bench/README.md)."
    parts.append(fill(text, 120, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(parts) + "\n"


def headline(records: list[tuple[str, Entry]], gpu: tuple[str, list[Entry]]) -> str:
    """Two figures for those who read no further."""
    (_, entry), *_ = records
    machine, step = entry["machine"], gpu[1][0]
    times = entry["kinds"][TOGETHER]["0"]["versus"]["decoding"]["times"]
    text = (
        f"Without a GPU, on {machine['cores']} cores of an {machine['cpu']}, {entry['target']} decodes "
        f"{times['ratio']:.2f} ({times['low']:.2f} to {times['high']:.2f}) times as fast as by llama.cpp's best way. "
        f"On an {step['card']} an 8B in bf16 takes {step['value'] * 1e3:.2f} ms for a token without drafts, "
        f"{step['over_floor']:.2f} times what reading its weights takes. [How fast](#how-fast) has the rest."
    )
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _conditions(entry: Entry) -> str:
    machine = entry["machine"]
    peers = ", ".join(f"{program} {entry[program]}" for program in ("llama.cpp", "xllamacpp") if program in entry)
    text = (
        f"No GPU: {machine['cores']} cores of an {machine['cpu']}, {entry['server_threads']} threads; {peers} serve "
        "the same weights in several formats, of which the fastest is shown. "
        f"{entry['target']}; {entry['distinct_prompts']} prompts, each sent once to every server over HTTP, in turns, "
        f"answers of up to {entry['max_tokens']} tokens (load average {machine['load_1m']:g}, our own threads "
        f"included). Tokens per second after the first, medians, T = {' / '.join(entry['kinds'][TOGETHER])}."
    )
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _speeds(entry: Entry) -> str:
    kinds = entry["kinds"]
    ways = _shown({way: _median(found) for way, found in next(iter(kinds[TOGETHER].values()))["ways"].items()})
    rows = [
        [way, *(" / ".join(f"{_median(found['ways'][way]):.0f}" for found in of.values()) for of in kinds.values())]
        for way in ways
    ]
    return markdown(["", *("all prompts" if kind == TOGETHER else kind for kind in kinds)], rows)


def _shown(medians: dict[str, float]) -> list[str]:
    """All of ours, and each mode of the others in the format in which it is fastest."""
    fastest: dict[str, str] = {}
    for way, median in medians.items():
        words = way.split(" ")
        kept = fastest.setdefault(way if way.startswith(OURS) else f"{words[0]} {words[-1]}", way)
        if median > medians[kept]:
            fastest[f"{words[0]} {words[-1]}"] = way
    return list(fastest.values())


def _median(figures: Entry) -> float:
    return float(figures["tokens_per_second"]["median"])


def _verdicts(entry: Entry) -> list[str]:
    """Ours next to theirs in words, a line for each measure."""
    found = entry["kinds"][TOGETHER]

    def times(name: str) -> str:
        known = {at: one["versus"][name]["times"] for at, one in found.items() if name in one["versus"]}
        return _at_each(known)

    drafting = _at_each({at: one["auto_over"][NONE] for at, one in found.items() if NONE in one["auto_over"]})
    ours = f" Drafts (`auto`) make ours another {drafting}." if drafting else ""
    lines = [
        f"- Decoding is {times('decoding')}.",
        f"- The first token comes {times('first token')}.",
        f"- A whole answer is {times('whole answer')}.",
        f"- Without drafts on either side, decoding is {times('plain')}.{ours}",
    ]
    wrapped = [
        fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for line in lines
    ]
    return ["Our fastest way beside llama.cpp's best, with 95 % intervals over prompts:\n", *wrapped]


def _beside(records: list[Entry]) -> str:
    """The fastest ways of other models."""
    rows = []
    for entry in records:
        found = entry["kinds"][TOGETHER]
        pairs = [one["versus"]["decoding"] for one in found.values()]
        speeds = [[one["ways"][way] for one in found.values()] for way in (NONE,)]
        speeds += [
            [one["ways"][pair[side]] for one, pair in zip(found.values(), pairs, strict=True)]
            for side in ("ours", "theirs")
        ]
        cells = [" / ".join(f"{_median(figures):.0f}" for figures in each) for each in speeds]
        made = "" if entry["target"].endswith(".gguf") else " ([inflated](bench/README.md#inflated-models))"
        rows.append([f"{entry['target']}{made}", *cells, " / ".join(f"{pair['times']['ratio']:.2f}" for pair in pairs)])
    columns = ["", NONE, "our fastest", "llama.cpp's best", "ours over theirs"]
    text = "Other models, measured in the same way, on other machines of the kind (compare within a row):"
    return f"{text}\n\n{markdown(columns, rows)}"


def _at_each(times: dict[str, Entry]) -> str:
    """The ratio at each temperature."""
    text = [f"{x['ratio']:.2f} ({x['low']:.2f} to {x['high']:.2f}) at T = {at}" for at, x in times.items()]
    return ", ".join(text).replace(" at T", " times as fast at T", 1)


def _at_once(entry: Entry) -> str:
    """Requests at once."""
    counts = entry["at_once"]
    ways = _shown({way: speed["median"] for way, speed in list(counts.values())[-1].items()})
    rows = [[way, *(f"{found[way]['median']:.0f}" for found in counts.values())] for way in ways]
    what = f"{entry['target']}, {entry['max_tokens']} tokens each"
    text = f"Tokens per second in total, by the number of requests at once ({what}):"
    return f"{text}\n\n{markdown(['', *counts], rows)}"


def _gpu_steps(steps: list[Entry]) -> str:
    """What a step takes that drafts so much."""
    by_way: dict[str, list[Entry]] = {}
    for one in steps:
        by_way.setdefault(f"{one['drafter']} {one['tree']}".strip(), []).append(one)
    first = next(iter(by_way.values()))
    rows = [
        [
            way,
            " / ".join(f"{one['value'] * 1e3:.2f}" for one in of),
            " / ".join(f"{one['value'] / plain['value']:.2f}" for one, plain in zip(of, first, strict=True)),
            f"{of[0]['over_floor']:.2f}",
        ]
        for way, of in by_way.items()
    ]
    temperatures = " / ".join(f"{one['temperature']:g}" for one in first)
    text = (
        f"On an {steps[0]['card']}: milliseconds of a step of an 8B in bf16 after {steps[0]['context']:,} tokens, "
        f"T = {temperatures}; Llama 3.1's shape with random weights, so what drafts bring is not in it. Floor: reading "
        "all that the step has to read."
    )
    wrapped = fill(text, 120, break_long_words=False, break_on_hyphens=False)
    return f"{wrapped}\n\n{markdown(['drafted', 'ms', 'over none', 'over the floor'], rows)}"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table; the first column is text."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rewritten(text: str, records: list[tuple[str, Entry]], gpu: tuple[str, list[Entry]]) -> str:
    """The README with its figures replaced."""
    for (begin, end), part in ((HEADLINE, headline), (PERFORMANCE, block)):
        before, rest = text.split(begin)
        text = before + begin + part(records, gpu) + end + rest.split(end)[1]
    return text


def options(parser: ArgumentParser) -> None:
    """None."""


def main(args: Namespace) -> None:
    records = newest()
    if not records:
        raise BadOption("no record of bench peers on several kinds of prompts yet: bench/README.md has the command")
    README.write_text(rewritten(README.read_text("utf-8"), records, on_gpu()), "utf-8")
