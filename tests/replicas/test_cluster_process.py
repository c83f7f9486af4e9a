"""The process that speaks to Ray: it is asked, it ends and comes back, and it takes no server along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foresay.server.replicas.cluster_process import ClusterProcess
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError

SECONDS = 120.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "ray"
    place.write_text("")
    return place


@pytest.fixture
async def cluster(place: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterProcess]:
    monkeypatch.setenv("FORESAY_API_KEY", "nobody else's")
    cluster = ClusterProcess("2", str(place), "tests.replicas.standing_in:Cluster")
    await cluster.open(ServeConfig(), lambda phase, share: None)
    yield cluster
    await cluster.close()


async def test_it_takes_several_calls_at_once(cluster):
    deploying = asyncio.create_task(cluster.deploy(ServeConfig()))
    while not deploying.done():
        [address] = await cluster.addresses()
    assert address.port == cluster.process.pid
    assert "FORESAY_API_KEY" not in address.host.split(",")
    assert await deploying == 2


async def test_what_it_cannot_do_is_raised(cluster, place):
    with pytest.raises(ForesayError, match="ValueError: a bug"):
        await cluster.deploy(ServeConfig(draft="none"))


async def test_what_keeps_it_from_being_opened_is_raised(tmp_path):
    cluster = ClusterProcess("2", str(tmp_path / "nowhere"), "tests.replicas.standing_in:Cluster")
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        await cluster.open(ServeConfig(), lambda phase, share: None)
    await cluster.close()


async def test_it_comes_back_when_ray_does_and_those_known_stay_until_then(cluster, place):
    before = await cluster.addresses()
    place.rename(place.with_suffix(".gone"))
    cluster.process.kill()
    for _ in range(5):
        assert await cluster.addresses() == before
        await asyncio.sleep(0.1)
    with pytest.raises(ForesayError):
        await cluster.deploy(ServeConfig())
    place.with_suffix(".gone").rename(place)
    async with asyncio.timeout(SECONDS):
        while (await cluster.addresses())[0].name != "oo":
            await asyncio.sleep(0.1)


async def test_it_is_closed_and_ends(place):
    cluster = ClusterProcess("2", str(place), "tests.replicas.standing_in:Cluster")
    await cluster.open(ServeConfig(), lambda phase, share: None)
    await cluster.close()
    assert place.read_text() == "closed"
    assert cluster.process is not None and cluster.process.poll() == 0
