"""The tables of docs/metrics.md, made of the declared metrics: ``python -m tests.telemetry.page`` renews them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foresay.server.observe.telemetry.metrics import SECTIONS, Metric

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = "| metric | type | |\n|---|---|---|\n"


def row(metric: Metric) -> str:
    """The line of one metric."""
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
    mark = " v" if metric.vllm is True else ""
    return f"| `foresay:{name}{labels}`{mark} | {metric.kind} | {metric.about.rstrip('.')} |\n"


def renewed(page: str) -> str:
    """The page with the tables as they are now, each first under its heading."""
    for heading, metrics in SECTIONS.items():
        page = _with_table(page, f"### {heading}\n\n", metrics)
    return page


def _with_table(page: str, heading: str, metrics: Sequence[Metric]) -> str:
    before, found, after = page.partition(heading)
    assert found, f"docs/metrics.md lacks the heading {heading.strip()}"
    lines = after.splitlines(keepends=True)
    while lines and lines[0].startswith("|"):
        del lines[0]
    return before + heading + HEAD + "".join(map(row, metrics)) + "\n" + "".join(lines).lstrip("\n")


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
