"""The tables of docs/metrics.md, made of the declared metrics: ``python -m tests.telemetry.page`` renews their rows.
Which table has a metric is said there."""

from __future__ import annotations

import re
from pathlib import Path

from foresay.server.metrics.counters import Counters
from foresay.server.metrics.fields import Metric, declared
from foresay.server.metrics.records import Connections, EngineGauges, Gauges, SelfCheckCounts, Startup

RECORDS = (Counters, Gauges, EngineGauges, Startup, Connections, SelfCheckCounts)
METRICS = {name: metric for record in RECORDS for name, metric in declared(record).items()}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `foresay:(\w+?)(?:_total)?(?:\{.*\})?`.*\n", re.MULTILINE)


def row(name: str, metric: Metric) -> str:
    """The line of one metric."""
    name += "_total" if metric.kind == "counter" else ""
    labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
    mark = " v" if metric.vllm is True else ""
    return f"| `foresay:{name}{labels}`{mark} | {metric.kind} | {metric.about.rstrip('.')} |\n"


def renewed(page: str) -> str:
    """The page with the rows as they are now."""
    listed = ROW.findall(page)
    assert sorted(listed) == sorted(METRICS), f"in only one of both: {set(listed) ^ set(METRICS)}"
    return ROW.sub(lambda found: row(found[1], METRICS[found[1]]), page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
