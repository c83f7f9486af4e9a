"""The text of ``/metrics``: the metrics declared in records, in Prometheus' format, under ``foresay:`` and partly
``vllm:``. Nothing here runs on the path of a step: a scrape reads the plain numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from foresay.server.metrics.fields import Histogram, Metric, Series, declared, value_of
from foresay.server.metrics.telemetry import Telemetry

PREFIX, COMPATIBLE_PREFIX = "foresay:", "vllm:"
KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
#: One model's values of a metric: the model's name first.
OfModel = tuple[str, Histogram | Sequence[Series]]
#: Encodes families as plain text, and its content type.
encode, CONTENT_TYPE = choose_encoder("")


class Exposition:
    """Telemetry in Prometheus' format, written piece by piece: the streams run in between.

    One telemetry per model. Metrics of the whole server carry the only model's name, or none if there are several.
    """

    def __init__(self, *telemetries: Telemetry) -> None:
        self._telemetries = telemetries
        self._process = ProcessCollector(registry=None)

    async def text(self) -> bytes:
        """All metrics that have values, and those of the process."""
        pieces = []
        for family in self.collect():
            pieces.append(encode(registry(family)))
            await asyncio.sleep(0)
        return b"".join(pieces)

    def collect(self) -> Iterator[Family]:
        """All metrics. Values that change with each step are read before the first is yielded."""
        each, names = [one.records() for one in self._telemetries], [one.model for one in self._telemetries]
        yield from families(names if len(names) == 1 else [""], [self._telemetries[0].connections])
        for records in zip(*each, strict=True):
            yield from families(names, records)
        yield from self._process.collect()


def families(names: Sequence[str], records: Sequence[Any]) -> Iterator[Family]:
    """The metrics of a record that each of these models has, under our names, if there is any series, and under
    vLLM's."""
    for name, metric in declared(records[0]).items():
        models = [(model, value_of(getattr(one, name))) for model, one in zip(names, records, strict=True)]
        if any(isinstance(value, Histogram) or value for _, value in models):
            yield _family(PREFIX + name, metric, metric.labels, models)
        if metric.vllm:
            vllm = name if metric.vllm is True else metric.vllm
            fewer = [(model, merged(value, metric.keep)) for model, value in models]
            labels = [metric.labels[index] for index in metric.keep]
            yield _family(COMPATIBLE_PREFIX + vllm, metric, labels, fewer)


def _family(name: str, metric: Metric, labels: Sequence[str], models: Sequence[OfModel]) -> Family:
    """Each series starts with vLLM's labels: the model's name, and the engine's number, always 0."""
    family: Any = KINDS[metric.kind](name, metric.about, labels=["model_name", "engine", *labels])
    for model, value in models:
        if isinstance(value, Histogram):
            bounds = [*map(str, value.bounds), "+Inf"]
            below = map(float, accumulate(value.counts))
            family.add_metric((model, "0"), list(zip(bounds, below, strict=True)), value.sum)
        else:
            for values, number in value:
                family.add_metric((model, "0", *values), number)
    made: Family = family
    return made


def merged(value: Histogram | Sequence[Series], keep: Sequence[int]) -> Histogram | Sequence[Series]:
    """The sums of series that agree in the labels ``keep``; a single 0 if there is no series and no label is left."""
    if isinstance(value, Histogram):
        return value
    sums: dict[tuple[str, ...], float] = {} if keep else {(): 0.0}
    for values, number in value:
        key = tuple(values[index] for index in keep)
        sums[key] = sums.get(key, 0.0) + number
    return list(sums.items())


def registry(*families: Family) -> SimpleNamespace:
    """Some families, with the interface that an encoder needs."""
    return SimpleNamespace(collect=lambda: families)
