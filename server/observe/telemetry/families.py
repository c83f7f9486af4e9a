"""What was counted, as metric families of prometheus-client: names and types as vLLM has them, under ``foresay:``.

Nothing here runs on the path of a step: a scrape reads the plain numbers and makes the families from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from foresay.server.observe.telemetry.counts import Histogram

PREFIX = "foresay:"
COMPATIBLE_PREFIX = "vllm:"
#: Series that tools look up under vLLM's name: its benchmark, routers and autoscalers, dashboards.
_SAME = (
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("spec_decode_num_accepted_tokens_per_pos", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
    *("prefix_cache_queries", "prefix_cache_hits", "request_success", "num_preemptions"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_params_max_tokens", "request_params_n"),
    *("websocket_connections_active", "websocket_connection_duration_seconds"),
)
#: Our name to vLLM's. What vLLM calls the latency between tokens is the one between events, of however many tokens.
COMPATIBLE = {name: name for name in _SAME} | {"inter_chunk_latency_seconds": "inter_token_latency_seconds"}

#: One series: the values of its labels, and its own.
Series = tuple[Sequence[str], float]
#: What a family tells: a number, numbers by the only label, series, or a histogram.
Told = float | Mapping[str, float] | Sequence[Series] | Histogram


class Family(NamedTuple):
    """What is told under one name: ours, and vLLM's if tools look it up.

    read: what is told of a reading; as a text, where it stands in that. keep: which labels vLLM has too, by index; the
    series that agree in these are one there. Before the labels of its own each series has those that vLLM puts on all
    of its: the model's name and the number of the engine, of which there is one here.
    """

    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    about: str
    read: str | Callable[[Any], Told]
    labels: Sequence[str] = ()
    keep: Sequence[int] = ()

    def told(self, reading: Any) -> Told:
        """What there is to tell."""
        told: Told = attrgetter(self.read)(reading) if isinstance(self.read, str) else self.read(reading)
        return told

    def metrics(self, told: Sequence[tuple[str, Told]]) -> Iterator[Metric]:
        """As Prometheus has it. told: by model, the name first."""
        yield self._metric(PREFIX + self.name, self.labels, told)
        if self.name in COMPATIBLE:
            labels = [self.labels[index] for index in self.keep]
            fewer = [(model, merged(value, self.keep)) for model, value in told]
            yield self._metric(COMPATIBLE_PREFIX + COMPATIBLE[self.name], labels, fewer)

    def _metric(self, name: str, labels: Sequence[str], told: Sequence[tuple[str, Told]]) -> Metric:
        metric: Any = self.kind(name, self.about, labels=["model_name", "engine", *labels])
        for model, value in told:
            if isinstance(value, Histogram):
                bounds = [*map(str, value.bounds), "+Inf"]
                below = map(float, accumulate(value.counts))
                metric.add_metric((model, "0"), list(zip(bounds, below, strict=True)), value.sum)
            else:
                for values, number in series(value):
                    metric.add_metric((model, "0", *values), number)
        made: Metric = metric
        return made


counter, gauge, histogram = (
    partial(Family, kind) for kind in (CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)
)


def series(told: float | Mapping[str, float] | Sequence[Series]) -> Sequence[Series]:
    """A number as the only series; numbers by label in the label's order."""
    if isinstance(told, Mapping):
        return [((label,), number) for label, number in sorted(told.items())]
    return told if isinstance(told, Sequence) else [((), told)]


def merged(told: Told, keep: Sequence[int]) -> Told:
    """The sums of series that agree in the labels ``keep``; one of 0 where there is none and no label is left."""
    if isinstance(told, Histogram):
        return told
    sums: dict[tuple[str, ...], float] = {} if keep else {(): 0.0}
    for values, value in series(told):
        key = tuple(values[index] for index in keep)
        sums[key] = sums.get(key, 0.0) + value
    return list(sums.items())


#: Schemes that leave names as ours are as they are.
HARMLESS = ("underscores", "values")


#: Makes text of a :class:`Registry`.
Encode = Callable[[Any], bytes]


def chosen(accept: str) -> tuple[Encode, str]:
    """The format that an Accept header asks for, and its content type; plain text if nobody can tell."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # a version that is none
        encode, content_type = choose_encoder("")
    if isinstance(encode, partial) and "openmetrics" in content_type and encode.keywords["escaping"] in HARMLESS:
        # prometheus-client 0.26 escapes a colon in samples and not in their TYPE: Prometheus 2 finds no name
        encode = partial(encode.func, **encode.keywords | {"escaping": ALLOWUTF8})
    return encode, content_type


class Registry:
    """Some families, as an encoder wants them."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Them."""
        return self._families
