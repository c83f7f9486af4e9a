"""The error where replicas are requested without Ray."""

from __future__ import annotations

import pytest

from foresay.server.replicas.cluster_process import ClusterProcess
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError


async def test_replicas_without_ray_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text("raise ImportError('there is none')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cluster = ClusterProcess("2", None)
    with pytest.raises(ConfigurationError, match=r"--replicas needs Ray Serve .*pip install 'foresay\[ray\]'"):
        await cluster.open(ServeConfig(), print)
    await cluster.close()
