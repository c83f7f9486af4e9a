"""What ``/metrics`` tells, read at one instant: its text takes several turns of the event loop."""

from __future__ import annotations

from copy import copy

import msgspec

from server.engine.status import EngineStatus
from server.observe.telemetry.histogram import Histogram
from server.observe.telemetry.report import Gauges
from server.observe.telemetry.self_check import SelfCheckCounts
from server.observe.telemetry.telemetry import Telemetry
from server.observe.telemetry.window import Window
from spec.request import EngineInfo


class Reading(msgspec.Struct, frozen=True):
    """What the families of one scrape are made from. speed_up, unsure: of the last minute. restarts, resumed, startup:
    of the engine. http: responses by status. websockets, websocket_seconds: those open, and how long the others were.
    """

    totals: Window
    gauges: Gauges
    speed_up: float | None
    unsure: bool
    plain_seconds: float
    status: EngineStatus
    info: EngineInfo | None
    restarts: dict[str, int]
    resumed: int
    startup: dict[str, float]
    http: dict[int, int]
    websockets: int
    websocket_seconds: Histogram
    self_check: SelfCheckCounts

    @classmethod
    def of(cls, telemetry: Telemetry) -> Reading:
        """As of now."""
        minute = telemetry.window(60)
        return cls(
            totals=telemetry.totals(),
            gauges=telemetry.gauges,
            speed_up=minute.speed_up,
            unsure=bool(minute.doubt),
            plain_seconds=telemetry.plain_seconds,
            status=telemetry.engine.status,
            info=telemetry.engine.info,
            restarts=dict(telemetry.startup.restarts),
            resumed=telemetry.startup.resumed,
            startup=dict(telemetry.startup.seconds),
            http=dict(telemetry.connections.http),
            websockets=telemetry.connections.websockets,
            websocket_seconds=telemetry.connections.websocket_seconds.copy(),
            self_check=copy(telemetry.self_check),
        )
