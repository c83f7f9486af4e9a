"""What whoever asks for replicas without Ray is told."""

from __future__ import annotations

import sys

import pytest

from server.host.models.model import Model
from server.host.state import ServerState
from server.settings.config import ServeConfig
from spec.errors import ConfigurationError


def test_replicas_without_ray_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "server.host.replicas.cluster", raising=False)
    with pytest.raises(ConfigurationError, match=r"--replicas needs Ray Serve .*pip install 'foresay\[ray\]'"):
        Model(["m"], ServeConfig(replicas="2"), ServerState(), print)
