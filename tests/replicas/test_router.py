"""Where a request goes, who is let in to ask an engine, and the process that speaks to Ray."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foresay.server.replicas import hosted
from foresay.server.replicas.cluster_process import ClusterProcess
from foresay.server.replicas.hosted import NONCE_BYTES, PROOF_BYTES, admit, introduce
from foresay.server.replicas.replica import ReplicaLoad, Router
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError
from tests.server.wire import until

IDLE = {"a": ReplicaLoad(0, 4), "b": ReplicaLoad(0, 4)}
LONG, OTHER = list(range(256)), list(range(1000, 1256))


def test_a_conversation_goes_on_where_it_began():
    router = Router(16)
    first = router.choose(LONG, "", IDLE)
    (other,) = IDLE.keys() - {first}
    busy = {first: ReplicaLoad(2, 4), other: ReplicaLoad(0, 4)}
    assert router.choose([*LONG, *OTHER], "", busy) == first


def test_a_text_that_nobody_knows_goes_to_whom_has_least_to_do():
    assert Router(16).choose(LONG, "", {"a": ReplicaLoad(1, 4), "b": ReplicaLoad(0, 4)}) == "b"
    assert Router(16).choose(LONG, "", {"a": ReplicaLoad(0, 4, unread=9), "b": ReplicaLoad(0, 4)}) == "b"


def test_a_prefix_does_not_make_a_request_wait_for_ever():
    router = Router(16)
    first = router.choose(LONG, "", IDLE)
    (other,) = IDLE.keys() - {first}
    assert router.choose(LONG, "", {first: ReplicaLoad(6, 4), other: ReplicaLoad(0, 4)}) == other


def test_tenants_do_not_see_each_others_prefixes():
    router = Router(16)
    first = router.choose(LONG, "one", IDLE)
    (other,) = IDLE.keys() - {first}
    loads = {first: ReplicaLoad(1, 4), other: ReplicaLoad(0, 4)}
    assert router.choose(LONG, "two", loads) == other
    assert router.choose(LONG, "one", loads | {other: ReplicaLoad(1, 4)}) in (first, other)


def test_what_does_not_fit_is_forgotten_and_so_is_who_is_gone():
    router = Router(16)
    small = {"a": ReplicaLoad(0, 4, pages=16)}
    router.choose(LONG, "", small)
    router.choose(OTHER, "", small)
    router.choose(OTHER, "", small)
    pages = [*router._there["a"]]
    assert len(pages) == 16
    assert router.known("a", list(reversed(pages))) == 16
    router.choose(OTHER, "", {"b": ReplicaLoad(0, 4)})
    assert "a" not in router._there


# -- who is let in to ask an engine ------------------------------------------------------------------------------------


SECRET = os.urandom(32)


class Gate:
    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.let_in: list[asyncio.WriteTransport] = []

    def made(self) -> asyncio.Protocol:
        gate = self

        class Admitted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.WriteTransport)
                gate.let_in.append(transport)

        return Admitted()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate()
    task = asyncio.create_task(admit(made.listener, SECRET, made.made))
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    made.listener.close()
    for each in made.let_in:
        each.close()


async def test_who_knows_the_secret_is_let_in_and_what_follows_is_left_to_others(gate):
    with await introduce("127.0.0.1", gate.port, SECRET) as ours:
        await until(lambda: gate.let_in)
        gate.let_in[0].write(b"first frame")
        assert await asyncio.get_running_loop().sock_recv(ours, 100) == b"first frame"


async def test_who_does_not_know_it_is_not(gate):
    with pytest.raises(EngineFailed, match="does not let this server in"):
        await introduce("127.0.0.1", gate.port, os.urandom(32))
    assert not gate.let_in


async def test_strangers_do_not_keep_others_out(gate, monkeypatch):
    monkeypatch.setattr(hosted, "HANDSHAKE_SECONDS", 1.0)
    silent = [socket.create_connection(("127.0.0.1", gate.port)) for _ in range(hosted.MOST_UNAUTHENTICATED)]
    for each in silent[::2]:
        each.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(NONCE_BYTES + PROOF_BYTES))
    with await introduce("127.0.0.1", gate.port, SECRET):
        await until(lambda: gate.let_in)
        assert len(gate.let_in) == 1
    for each in silent:
        each.close()


async def test_a_server_without_the_secret_gets_nothing():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(os.urandom(NONCE_BYTES))
        requested.append(await reader.readexactly(NONCE_BYTES + PROOF_BYTES))
        writer.write(os.urandom(PROOF_BYTES))
        writer.close()

    requested: list[bytes] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises(EngineFailed, match="does not know this replica's secret"):
            await introduce("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    assert SECRET not in requested[0]


# -- the process that speaks to Ray: it is asked, it ends and comes back, and it takes no server along -----------------


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


async def test_replicas_without_ray_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text("raise ImportError('there is none')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cluster = ClusterProcess("2", None)
    with pytest.raises(ConfigurationError, match=r"--replicas needs Ray Serve .*pip install 'foresay\[ray\]'"):
        await cluster.open(ServeConfig(), print)
    await cluster.close()
