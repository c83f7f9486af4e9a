"""The text of ``/metrics``: the metrics of metrics.py in Prometheus' format, under ``foresay:`` and partly ``vllm:``.

Nothing here runs on the path of a step: a scrape reads the plain numbers and builds prometheus-client's metric
families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.process_collector import ProcessCollector

from foresay.server.observe.telemetry.counts import Histogram
from foresay.server.observe.telemetry.metrics import CONNECTIONS, REPLICAS, SECTIONS, Metric, Series
from foresay.server.observe.telemetry.telemetry import Telemetry
from foresay.server.observe.telemetry.views import WorkSlices

PREFIX, COMPATIBLE_PREFIX = "foresay:", "vllm:"
KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
#: One model's values of a metric: the model's name first.
OfModel = tuple[str, Histogram | Sequence[Series]]
#: Escaping schemes that do not change our names.
HARMLESS = ("underscores", "values")
#: Encodes families as text.
Encode = Callable[[Any], bytes]


class Exposition:
    """Telemetry in Prometheus' format, written piece by piece: the streams run in between.

    One telemetry per model. Metrics of the whole server carry the only model's name, or none if there are several.
    """

    def __init__(self, *telemetries: Telemetry) -> None:
        self._telemetries = telemetries
        self._process = ProcessCollector(registry=None)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the Accept header requests."""
        encode, content_type = chosen(accept)
        end, pieces, slices = encode(registry()), [], WorkSlices()
        for family in self.collect():
            pieces.append(encode(registry(family)).removesuffix(end))
            await slices.pause()
        return b"".join([*pieces, end]), content_type

    def collect(self) -> Iterator[Family]:
        """All metrics. Values that change with each step are read before the first is yielded."""
        models = [(one.model, one.reading(one.window(60))) for one in self._telemetries]
        server = models if len(models) == 1 else [("", models[0][1])]
        replicas = any(reading.replicas for _, reading in models)
        for metrics in SECTIONS.values():
            if metrics is REPLICAS and not replicas:
                continue
            for metric in metrics:
                of = server if metrics is CONNECTIONS else models
                yield from families(metric, [(model, metric.read(reading)) for model, reading in of])
        yield from self._process.collect()


def families(metric: Metric, models: Sequence[OfModel]) -> Iterator[Family]:
    """A metric's family under our name, and under vLLM's if it has one."""
    yield _family(PREFIX + metric.name, metric, metric.labels, models)
    if metric.vllm:
        name = metric.name if metric.vllm is True else metric.vllm
        fewer = [(model, merged(value, metric.keep)) for model, value in models]
        yield _family(COMPATIBLE_PREFIX + name, metric, [metric.labels[index] for index in metric.keep], fewer)


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


def chosen(accept: str) -> tuple[Encode, str]:
    """The format that an Accept header requests, and its content type; plain text if the header is invalid."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # an invalid version
        encode, content_type = choose_encoder("")
    if isinstance(encode, partial) and "openmetrics" in content_type and encode.keywords["escaping"] in HARMLESS:
        # prometheus-client 0.26 escapes colons in samples but not in TYPE lines, so Prometheus 2 cannot match them
        encode = partial(encode.func, **encode.keywords | {"escaping": ALLOWUTF8})
    return encode, content_type
