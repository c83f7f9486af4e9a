"""The newest results as markdown for the README: ``python -m bench.report [--results DIR]``.

One section per benchmark, from the newest file of its kind, with the machine and the command it was made with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.record import RESULTS
from bench.versus import COLUMNS, rows, sentences

Entry = dict[str, Any]


def newest(directory: Path) -> dict[str, Entry]:
    """The latest result of every benchmark, by its name."""
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in directory.glob("*.json")]
    return {entry["bench"]: entry for entry in sorted(entries, key=lambda entry: str(entry["date"]))}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(value: Entry, digits: int = 1) -> str:
    """Median and quartiles."""
    return f"{value['median']:.{digits}f} ({value['q1']:.{digits}f} to {value['q3']:.{digits}f})"


def ratio(value: Entry | None) -> str:
    """A ratio and its interval, or nothing."""
    return f"{value['ratio']:.2f} ({value['low']:.2f} to {value['high']:.2f})" if value else ""


def decode(entry: Entry) -> str:
    """Speculation on and off, one table per temperature, floors below."""
    columns = [
        "decoding",
        "tok/s",
        "times none",
        "times n-gram",
        "tokens/step",
        "ms/step",
        "draft share",
        "accepted by depth, cumulative",
    ]
    parts = []
    for temperature, modes in entry["temperature"].items():
        trigrams = next(iter(modes.values()))["distinct_trigrams"]
        rows = [
            [
                mode, spread(s["tokens_per_second"]), ratio(s.get("vs_none")), ratio(s.get("vs_ngram")),
                f"{s['tokens_per_step']:.2f}", spread(s["ms_per_step"]), f"{s['draft_share']:.0%}",
                " ".join(f"{share:.2f}" for share in s["reached_per_depth"]),
            ]
            for mode, s in modes.items()
        ]  # fmt: skip
        parts.append(f"Temperature {temperature} (distinct trigrams: {trigrams:.0%})\n\n{markdown(columns, rows)}")
    if entry["floor"]:
        parts.append(floor(entry))
    return "\n\n".join(parts)


def floor(entry: Entry) -> str:
    """Step floors."""
    found = entry["floor"]
    rows = [
        [
            count, spread(row["linears_ms"]), spread(row["forward_ms"]), f"{row['forward_over_linears']:.2f}",
            f"{row['step_multiple']:.2f}",
        ]
        for count, row in found["rows"].items()
    ]  # fmt: skip
    columns = ["rows", "linears alone, ms", "bare forward, ms", "forward / linears", "forward / bytes floor"]
    said = (
        f"{found['bytes_per_step'] / 1e6:.0f} MB of weights a step at {found['bandwidth_gb_s']:.1f} GB/s "
        f"(probed in the same run): {found['floor_ms']:.1f} ms"
    )
    return f"{said}\n\n{markdown(columns, rows)}"


def drafters(entry: Entry) -> str:
    """What each drafter guesses right, all temperatures in one table, and how well each knows the target below."""
    columns = ["drafter", "T", "tokens/step", "nodes/step", "drafted", "accepted by depth, conditional"]
    rows = [
        [
            mode, temperature, ratio(f["tokens_per_step"]), f"{f['drafted_nodes_per_step']:.1f}",
            f"{f['drafted_tokens']}", numbers(f["accepted_given_parent"]), ratio(f.get("not_shared")),
            ratio(f.get("gain")),
        ]
        for temperature, modes in entry["temperature"].items()
        for mode, f in modes.items()
    ]  # fmt: skip
    found = entry["judged"]
    judged = [
        [kind, numbers(of["loss"]), numbers(of["greedy"]), numbers(of["sampled"])]
        for kind, of in found["depths"].items()
    ]
    said = f"At most {entry['nodes']} nodes, the root among them; all wrote the same tokens."
    below = f"On texts written at T = {found['written_at']:g}, whose entropy is {found['entropy_of_target']:.2f} nats:"
    knows = ["drafter", "cross-entropy by depth", "likeliest token is the target's", "same draw at T = 1"]
    table = markdown([*columns, "tokens/step, noise not shared", "times"], rows)
    return f"{said}\n\n{table}\n\n{below}\n\n{markdown(knows, judged)}"


def numbers(values: Sequence[float]) -> str:
    """Two digits each."""
    return " ".join(f"{value:.2f}" for value in values)


def overhead(entry: Entry) -> str:
    """What the engine adds."""
    columns = ["decoding", "added, ms p50", "added, ms p99", "models, ms p50"]
    keys = ["added_ms_p50", "added_ms_p99", "models_ms_p50"]
    rows = [[way, *(f"{row[key]:.2f}" for key in keys)] for way, row in entry["ways"].items()]
    return f"Vocabulary {entry['vocab_size']:,}\n\n{markdown(columns, rows)}"


def peers(entry: Entry) -> str:
    """Foresay beside others, a table for each kind of prompts and temperature."""
    parts = []
    for kind, temperatures in entry.get("kinds", {}).items():  # not of old records
        for temperature, found in temperatures.items():
            shown = [[way, *map(spread, cells)] for way, *cells in rows(found)]
            said = "; ".join(sentences(found, ratio))
            parts.append(f"{kind}, T = {temperature}\n\n{markdown(COLUMNS, shown)}\n\n{said}")
    return "\n\n".join(parts)


def http(entry: Entry) -> str:
    """Streamed against not."""
    columns = ["streamed, ms", "not streamed, ms", "streamed / not", "pairs"]
    row = [spread(entry["streamed_ms"], 0), spread(entry["whole_ms"], 0), ratio(entry["ratio"]), str(entry["pairs"])]
    return markdown(columns, [row])


def forced(entry: Entry) -> str:
    """Forced draws, one table per trace."""
    columns = ["decoding", "tok/s", "times none", "tokens/step", "ms/step"]
    parts = []
    for name, modes in entry["traces"].items():
        rows = [
            [
                mode, spread(s["tokens_per_second"]), ratio(s.get("vs_none")), f"{s['tokens_per_step']:.2f}",
                spread(s["ms_per_step"]),
            ]
            for mode, s in modes.items()
        ]  # fmt: skip
        parts.append(f"Trace {name}\n\n{markdown(columns, rows)}")
    return "\n\n".join(parts)


SECTIONS: dict[str, tuple[str, Callable[[Entry], str]]] = {
    "decode": ("Speculation on and off", decode),
    "drafters": ("Drafters", drafters),
    "floor": ("Floors", floor),
    "overhead": ("What the engine adds to a forward pass", overhead),
    "peers": ("Beside others", peers),
    "http": ("Streaming", http),
    "forced": ("Forced draws", forced),
}


def origin(entry: Entry) -> str:
    """Where a figure comes from: models, machine, date, command."""
    machine = entry["machine"]
    models = " + ".join(name for name in (entry["target"], entry.get("draft")) if name)
    dtype = f", {entry['dtype']}" if "dtype" in entry else ""
    where = f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}"
    return f"{models}{dtype}; {where}; {entry['date'][:10]}; `{entry['command']}`"


def report(directory: Path) -> str:
    """All sections."""
    entries = newest(directory)
    parts = [
        f"### {title}\n\n{section(entries[bench])}\n\n{origin(entries[bench])}"
        for bench, (title, section) in SECTIONS.items()
        if bench in entries
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Results as markdown.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    print(report(parser.parse_args().results))


if __name__ == "__main__":
    main()
