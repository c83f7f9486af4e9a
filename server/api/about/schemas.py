"""What the server says about itself, on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from spec.request import EngineInfo


class Index(msgspec.Struct, kw_only=True):
    """``GET /``."""

    name: str = "foresay"
    version: str
    model: str
    status: str
    routes: list[str]


class Health(msgspec.Struct, kw_only=True):
    """``GET /health``: what runs, and whether speculation changes its tokens. drafter: who drafts, by name; draft: the
    same as ``--draft`` takes it. running: requests running and waiting.

    status: ok, unloaded (nobody asked for long; the next request waits until it is loaded), loading, down, failed or
    draining. models: of a server with several, the same by name.
    """

    status: str
    model: str
    message: str | UnsetType = UNSET
    exact: str | UnsetType = UNSET
    exact_reason: str | UnsetType = UNSET
    target: str | UnsetType = UNSET
    drafter: str | UnsetType = UNSET
    draft: str | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    device: str | UnsetType = UNSET
    running: int
    engine_starts: int
    models: dict[str, str] | UnsetType = UNSET


class Readiness(msgspec.Struct, kw_only=True):
    """``GET /ready``, when requests are taken."""

    status: str


class Load(msgspec.Struct, kw_only=True):
    """``GET /load``. running: sequences that have a place in the engine; waiting: those for which there is none yet."""

    running: int
    waiting: int


class Version(msgspec.Struct, kw_only=True):
    """``GET /version``."""

    version: str


class ServerInfo(msgspec.Struct, kw_only=True):
    """``GET /server_info``. started: in seconds since 1970. config: the settings in effect, secrets left out. engine:
    null until it was ready once. models: of a server with several, the engine of each; ``engine`` is that of the first.
    """

    version: str
    model: str
    status: str
    started: int
    config: dict[str, Any]
    engine: EngineInfo | None
    models: dict[str, EngineInfo | None] | UnsetType = UNSET
