"""The text of ``/metrics``: the metrics declared in records, in Prometheus' format, under ``foresay:`` and partly
``vllm:``. Nothing here runs on the path of a step: a scrape reads the plain numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from foresay.server.observe.telemetry.metrics import Histogram, Metric, Series, declared, value_of
from foresay.server.observe.telemetry.telemetry import Telemetry

PREFIX, COMPATIBLE_PREFIX = "foresay:", "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: One model's values of a metric: the model's name first.
OfModel = tuple[str, Histogram | Sequence[Series]]
#: After this long the event loop runs. A single piece of work takes up to five times as long.
SLICE_SECONDS = 50e-6
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Exposition:
    """Telemetry in Prometheus' format, written piece by piece: the streams run in between.

    One telemetry per model. Metrics of the whole server carry the only model's name, or none if there are several.
    """

    def __init__(self, *telemetries: Telemetry) -> None:
        self._telemetries = telemetries
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def text(self) -> bytes:
        """All metrics that have values, and those of the process."""
        pieces, began = [], time.perf_counter()
        for family in self._families():
            pieces.append(family)
            if time.perf_counter() - began > SLICE_SECONDS:
                await asyncio.sleep(0)
                began = time.perf_counter()
        return "".join(pieces).encode() + generate_latest(self._process)

    def _families(self) -> Iterator[str]:
        """All metrics. Values that change with each step are read before the first is yielded."""
        each, names = [one.records() for one in self._telemetries], [one.model for one in self._telemetries]
        yield from families(names if len(names) == 1 else [""], [self._telemetries[0].connections])
        for records in zip(*each, strict=True):
            yield from families(names, records)


def families(names: Sequence[str], records: Sequence[Any]) -> Iterator[str]:
    """The metrics of a record that each of these models has, under our names, if there is any series, and under
    vLLM's."""
    for name, metric in declared(records[0]).items():
        models = [(model, value_of(getattr(one, name))) for model, one in zip(names, records, strict=True)]
        if any(isinstance(value, Histogram) or value for _, value in models):
            yield "".join(_family(PREFIX + name, metric, metric.labels, models))
        if metric.vllm:
            vllm = name if metric.vllm is True else metric.vllm
            fewer = [(model, merged(value, metric.keep)) for model, value in models]
            labels = [metric.labels[index] for index in metric.keep]
            yield "".join(_family(COMPATIBLE_PREFIX + vllm, metric, labels, fewer))


def _family(name: str, metric: Metric, labels: Sequence[str], models: Sequence[OfModel]) -> Iterator[str]:
    """Each series starts with vLLM's labels: the model's name, and the engine's number, always 0."""
    name += "_total" if metric.kind == "counter" else ""
    yield f"# HELP {name} {metric.about}\n# TYPE {name} {metric.kind}\n"
    for model, value in models:
        own = f'model_name="{model.translate(_ESCAPED)}",engine="0"'
        if isinstance(value, Histogram):
            for bound, below in zip([*value.bounds, "+Inf"], accumulate(value.counts), strict=True):
                yield f'{name}_bucket{{{own},le="{bound}"}} {below}\n'
            yield f"{name}_count{{{own}}} {value.count}\n{name}_sum{{{own}}} {value.sum}\n"
        else:
            for values, number in value:
                more = zip(labels, values, strict=True)
                each = ",".join([own, *(f'{label}="{one.translate(_ESCAPED)}"' for label, one in more)])
                yield f"{name}{{{each}}} {number + 0}\n"


def merged(value: Histogram | Sequence[Series], keep: Sequence[int]) -> Histogram | Sequence[Series]:
    """The sums of series that agree in the labels ``keep``; a single 0 if there is no series and no label is left."""
    if isinstance(value, Histogram):
        return value
    sums: dict[tuple[str, ...], float] = {} if keep else {(): 0.0}
    for values, number in value:
        key = tuple(values[index] for index in keep)
        sums[key] = sums.get(key, 0.0) + number
    return list(sums.items())
