"""What was counted, as metric families of prometheus-client: names and types as vLLM has them, under ``foresay:``.

Nothing here runs on the path of a step: a scrape reads the plain numbers and makes the families from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from server.observe.telemetry.counts import Histogram

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


class Families:
    """Makes the families of one model; each label list is behind those that vLLM puts on all of its series: the model's
    name and the number of the engine, of which there is one here."""

    def __init__(self, model: str) -> None:
        self._labels, self._values = ("model_name", "engine"), (model, "0")

    def counter(
        self, name: str, about: str, series: Sequence[Series], labels: Sequence[str] = (), keep: Sequence[int] = ()
    ) -> Iterator[Metric]:
        """A counter; its name gets ``_total``. keep: which labels vLLM has too, by index; the others are summed up."""
        ours, *compatible = _names(name)
        yield self._simple(CounterMetricFamily, ours, about, series, labels)
        for full in compatible:
            yield self._simple(
                CounterMetricFamily, full, about, merged(series, keep), [labels[index] for index in keep]
            )

    def gauge(self, name: str, about: str, series: Sequence[Series], labels: Sequence[str] = ()) -> Iterator[Metric]:
        """A gauge."""
        for full in _names(name):
            yield self._simple(GaugeMetricFamily, full, about, series, labels)

    def histogram(self, name: str, about: str, histogram: Histogram) -> Iterator[Metric]:
        """A histogram."""
        bounds = [*map(str, histogram.bounds), "+Inf"]
        for full in _names(name):
            family = HistogramMetricFamily(full, about, labels=self._labels)
            below = map(float, accumulate(histogram.counts))
            family.add_metric(self._values, list(zip(bounds, below, strict=True)), histogram.sum)
            yield family

    def _simple(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        about: str,
        series: Sequence[Series],
        labels: Sequence[str],
    ) -> Metric:
        family = kind(name, about, labels=[*self._labels, *labels])
        for values, value in series:
            family.add_metric([*self._values, *values], value)
        return family


def merged(series: Sequence[Series], keep: Sequence[int]) -> list[Series]:
    """The sums of series that agree in the labels ``keep``; one of 0 where there is none and no label is left."""
    sums: dict[tuple[str, ...], float] = {} if keep else {(): 0.0}
    for values, value in series:
        key = tuple(values[index] for index in keep)
        sums[key] = sums.get(key, 0.0) + value
    return list(sums.items())


def by(counts: Mapping[str, float]) -> list[Series]:
    """Series with one label, in its order."""
    return [((label,), count) for label, count in sorted(counts.items())]


def one(value: float) -> list[Series]:
    """The only series of a family without labels."""
    return [((), value)]


def _names(name: str) -> list[str]:
    """Ours, and vLLM's if tools look it up."""
    return [PREFIX + name, *([COMPATIBLE_PREFIX + COMPATIBLE[name]] if name in COMPATIBLE else [])]


#: Schemes that leave names as ours are as they are.
HARMLESS = ("underscores", "values")


class Collected(Protocol):
    """What an encoder reads."""

    def collect(self) -> Iterable[Metric]:
        """The families."""
        ...


Encode = Callable[[Collected], bytes]


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


class SelfCheckCounts(msgspec.Struct):
    """share: of the finished requests, how many are decoded again plainly. checked: those that were; tokens: compared
    with them; mismatches: requests whose tokens differ. waiting: for the engine to be idle. skipped: had to give way to
    newer ones, or were lost with the engine."""

    share: float = 0.0
    checked: int = 0
    tokens: int = 0
    mismatches: int = 0
    waiting: int = 0
    skipped: int = 0
