"""How a metric is declared: beside the field that counts it, with its help and its labels; their name is one.

::

    @dataclass(slots=True)
    class Counters:
        engine_steps: int = counter("Steps of the engine.")

What is declared so is exposed under ``/metrics`` (exposition.py) and is a line of docs/metrics.md (``python -m
tests.telemetry.page`` writes its tables). A record's fields are numbers, numbers by label, and histograms; two states
of one record can be subtracted.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, fields
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

#: Upper bounds in seconds of the time between two chunks or tokens: a small model on a CPU takes less than a
#: millisecond per token, a large one on a busy machine a second.
TOKEN_BOUNDS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0065, 0.008),
    *(0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)
#: Of whole requests and their parts.
REQUEST_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Tokens that one step emitted for one request.
RUN_BOUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)
#: How long WebSockets stay open.
SOCKET_BOUNDS = (0.1, 1.0, 10.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
#: Choices that a request wants.
CHOICE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Tokens of a prompt or an answer.
LENGTH_BOUNDS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)

K = TypeVar("K")
N = TypeVar("N", int, float)
R = TypeVar("R")


class Histogram:
    """counts: values in each bucket (above the previous bound, up to this one); the last is of those above all bounds.
    count, sum: of all values."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.count = 0
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self.count += times
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def since(self, earlier: Histogram) -> Histogram:
        """The values counted after an earlier state."""
        later = copy(self)
        later.count -= earlier.count
        later.counts = list(map(operator.sub, self.counts, earlier.counts))
        later.sum -= earlier.sum
        return later

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` of all values do not exceed, interpolated linearly within its bucket; None without
        values.

        A value above the last bound is reported as that bound.
        """
        wanted, below = share * self.count, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= wanted:
                high = self.bounds[min(index, len(self.bounds) - 1)]
                low = 0.0 if index == 0 else self.bounds[index - 1]
                return low + (high - low) * (wanted - below) / count if index < len(self.bounds) else high
            below += count
        return None


def count(counts: dict[K, N], key: K, more: N) -> None:
    """Add to one of several counts."""
    counts[key] = counts.get(key, 0) + more


def kept(record: R) -> R:
    """A copy that counts no further; of dataclasses with slots."""
    return type(record)(**{name: _kept(getattr(record, name)) for name in record.__slots__})  # type: ignore[attr-defined]


def _kept(value: Any) -> Any:
    if isinstance(value, Histogram):
        value = copy(value)
        value.counts = list(value.counts)
        return value
    return dict(value) if isinstance(value, dict) else value


def since(later: R, earlier: R) -> R:
    """What a record has counted after an earlier state of it, without the labels of which nothing was. What is neither
    a number nor a count is the later one's, if it is another than before."""
    names: Sequence[str] = later.__slots__  # type: ignore[attr-defined]
    return type(later)(**{name: _since(getattr(later, name), getattr(earlier, name)) for name in names})


def _since(later: Any, earlier: Any) -> Any:
    if isinstance(later, int | float):
        return later - earlier
    if isinstance(later, dict):
        return {key: now - before for key, now in later.items() if now != (before := earlier.get(key, 0))}
    if isinstance(later, Histogram):
        return later.since(earlier)
    return None if later is earlier else later


class Metric(NamedTuple):
    """about: its help. labels: besides those that every series has. vllm: vLLM's name for it, where tools expect it,
    True for the same; keep: indices of the labels that vLLM has too: series that agree in these are summed there."""

    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: Sequence[str] = ()
    vllm: str | Literal[True] = ""
    keep: Sequence[int] = ()


def counter(
    about: str,
    labels: Sequence[str] = (),
    known: Sequence[str] = (),
    vllm: str | Literal[True] = "",
    keep: Sequence[int] = (),
) -> Any:
    """A number; with labels, numbers by label. known: values of the label that are exposed from the start."""
    return _declared(Metric("counter", about, labels, vllm, keep), partial(dict.fromkeys, known, 0) if labels else int)


def gauge(about: str, labels: Sequence[str] = (), vllm: str | Literal[True] = "", keep: Sequence[int] = ()) -> Any:
    """The same; nothing is exposed of one that is None."""
    return _declared(Metric("gauge", about, labels, vllm, keep), dict if labels else int)


def histogram(about: str, bounds: Sequence[float], vllm: str | Literal[True] = "") -> Any:
    """Values by their upper bounds."""
    return _declared(Metric("histogram", about, vllm=vllm), partial(Histogram, bounds))


def _declared(metric: Metric, empty: Any) -> Any:
    return field(default_factory=empty, metadata={"metric": metric})


#: One series: the values of its labels, and its value.
Series = tuple[Sequence[str], float]


def declared(record: Any) -> dict[str, Metric]:
    """The metrics of a record or its class, by their names, which are those of its fields."""
    return {each.name: each.metadata["metric"] for each in fields(record) if each.metadata}


def value_of(value: Any) -> Histogram | Sequence[Series]:
    """A field's value as series, sorted by label."""
    if isinstance(value, Histogram):
        return value
    if isinstance(value, Mapping):
        return [((key,) if isinstance(key, str) else key, number) for key, number in sorted(value.items())]
    return [] if value is None else [((), value)]
