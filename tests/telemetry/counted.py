"""A choice's counts without its text: what the stats of a request read of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from foresay.server.metrics.telemetry import RequestStats
from foresay.server.text.choice import Choice, Piece
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics


def chosen(id: str = "r", prompt: int = 1) -> Choice:
    request = Request(id=id, prompt=[1] * prompt, params=SamplingParams())
    return cast(Choice, SimpleNamespace(request=request, counts=Statistics()))


def kept(stats: RequestStats, delta: Delta, piece: Piece) -> None:
    """Count a step as its choice does, and then its stats."""
    stats._counts.take(delta, len(piece.token_ids))
    stats.kept(delta, piece)
