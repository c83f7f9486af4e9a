"""The README's figures, from the newest record of ``bench.peers`` that has everybody: ``python -m bench.readme``.

The part of README.md between two marks is written anew; a test holds it against the record.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.record import RESULTS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- performance:begin -->\n", "<!-- performance:end -->\n"
#: The ways that are shown, and what they are called.
WAYS = {
    "transformers": "transformers",
    "transformers prompt lookup": "transformers, prompt lookup",
    "transformers assisted": "transformers, assistant model",
    "llama.cpp": "llama.cpp",
    "llama.cpp n-gram": "llama.cpp, n-gram",
    "llama.cpp draft:4": "llama.cpp, draft model, 4 ahead",
    "foresay none": "Foresay, no drafts",
    "foresay ngram": "Foresay, n-gram, 4 ahead",
    "foresay draft_model:4": "Foresay, draft model, 4 ahead",
    "foresay auto": "Foresay, auto",
}
PLAIN, OURS = "foresay none", "foresay draft_model:4"

Entry = dict[str, Any]


def newest(directory: Path = RESULTS) -> tuple[str, Entry]:
    """The latest record in which all of :data:`WAYS` decoded, and its file's name."""
    found = [(file.name, json.loads(file.read_text("utf-8"))) for file in sorted(directory.glob("*-peers.json"))]
    return [(name, entry) for name, entry in found if set(WAYS) <= set(next(iter(entry["temperature"].values())))][-1]


def block(name: str, entry: Entry) -> str:
    """The text for the README."""
    temperatures = list(entry["temperature"])
    head = f"| tokens per second | {' | '.join(f'T = {t}' for t in temperatures)} |"
    lines = [head, f"|---|{'---|' * len(temperatures)}"]
    lines += [f"| {shown} | {' | '.join(_speed(entry, t, way) for t in temperatures)} |" for way, shown in WAYS.items()]
    return "\n".join([_conditions(entry), "", *lines, "", *_verdicts(entry), "", _source(name)]) + "\n"


def _conditions(entry: Entry) -> str:
    machine = entry["machine"]
    said = (
        f"No GPU: {machine['cores']} cores of an {machine['cpu']}, {machine['threads']} threads, {entry['dtype']}; "
        f"transformers {machine['transformers']}, llama.cpp {entry['llama.cpp']}, torch {machine['torch']}. The same "
        "checkpoint for all: the bundled target *inflated* to the shape of a 135M model, which costs what such a model "
        f"costs and says what the small one says. {entry['prompts']} prompts, {entry['max_tokens']} tokens each, "
        f"{entry['rounds']} rounds, all in turns in one run (the machine's load was then "
        f"{machine['load_1m']:g}, its own threads counted in). Decoding alone, without the prompt: median, in "
        "brackets the quartiles."
    )
    return fill(said, 120, break_long_words=False, break_on_hyphens=False)


def _speed(entry: Entry, temperature: str, way: str) -> str:
    speed = entry["temperature"][temperature][way]["tokens_per_second"]
    return f"{speed['median']:.1f} [{speed['q1']:.1f}, {speed['q3']:.1f}]"


def _verdicts(entry: Entry) -> list[str]:
    """Ours beside the fastest way of each of the others (95 % intervals over prompts), a line for each temperature."""
    return [_verdict(temperature, ways) for temperature, ways in entry["temperature"].items()]


def _verdict(temperature: str, ways: Entry) -> str:
    said = []
    for program in ("transformers", "llama.cpp"):
        best = max((way for way in WAYS if way.startswith(program)), key=lambda way: _median(ways[way]))
        how = WAYS[best].partition(", ")[2] or "plain"
        said.append(f"{_ratio(ways[best], OURS)} times as fast as {program} ({how})")
    text = f"- T = {temperature}: Foresay with its draft model is {' and '.join(said)}; "
    text += f"without drafts it is {_ratio(ways['llama.cpp'], PLAIN)} times as fast as llama.cpp without."
    return fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _ratio(way: Entry, ours: str) -> str:
    ratio = way[f"{ours} is faster by"]
    return f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _median(way: Entry) -> float:
    return float(way["tokens_per_second"]["median"])


def _source(name: str) -> str:
    return f"The record is `bench/results/{name}`, the command in [bench/README.md](bench/README.md)."


def rewritten(text: str, part: str) -> str:
    """The README with its figures replaced."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + part + END + rest.split(END)[1]


def main() -> None:
    README.write_text(rewritten(README.read_text("utf-8"), block(*newest())), "utf-8")


if __name__ == "__main__":
    main()
