"""Metric families as text, one at a time, by prometheus-client's encoders: together what they write of all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

#: Schemes that leave names as ours are as they are.
HARMLESS = ("underscores", "values")


class Collected(Protocol):
    """What an encoder reads."""

    def collect(self) -> Iterable[Metric]:
        """The families."""
        ...


Encode = Callable[[Collected], bytes]


class Formats:
    """The texts of each format that was asked for; there are few."""

    def __init__(self) -> None:
        self._texts: dict[tuple[bool, str], Texts] = {}

    def chosen(self, accept: str) -> tuple[Texts, str]:
        """What an Accept header asks for, and its content type; plain text if nobody can tell."""
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # a version that is none
            encode, content_type = choose_encoder("")
        openmetrics, escaping = "openmetrics" in content_type, ""
        if isinstance(encode, partial):
            escaping = encode.keywords["escaping"]
            if openmetrics and escaping in HARMLESS:
                # prometheus-client 0.26 escapes a colon in samples and not in their TYPE: Prometheus 2 finds no name
                encode = partial(encode.func, **encode.keywords | {"escaping": ALLOWUTF8})
        return self._texts.setdefault((openmetrics, escaping), Texts(encode)), content_type


class Texts:
    """The text of each family in one format. A family that is told again unchanged is not written again."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[str, tuple[Metric, bytes]] = {}
        self.end = encode(Registry())

    def of(self, family: Metric) -> bytes:
        """One family."""
        known = self._known.get(family.name)
        if known is None or known[0] is not family:
            text = self._encode(Registry(family)).removesuffix(self.end)
            known = self._known[family.name] = family, text
        return known[1]


class Registry:
    """Some families, as an encoder wants them."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Them."""
        return self._families
