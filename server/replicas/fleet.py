"""Several engines that act as one: each request goes to one of them, and continues in another if that is lost.

::

                 listed by the cluster            Ready                    closed, or no longer listed
    (unknown) ──────────────────────> connecting ───────> asked ───────────────────> (gone)
                                                            requests ───> another replica, else they wait for one

The cluster starts, places, watches and ends replicas (:mod:`foresay.server.replicas.cluster_process`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from msgspec.structs import replace

from foresay.server.engine.generation import Cause, EngineStatus, Sink, check_comes, unavailable
from foresay.server.engine_process import frames
from foresay.server.engine_process.client_base import Progress, Supervised, log
from foresay.server.engine_process.resumption import AGAIN, InFlight, InFlights
from foresay.server.metrics.records import Replica
from foresay.server.replicas.hosted import Address
from foresay.server.replicas.replica import ReplicaClient, Router
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.request import Request
from foresay.spec.trace import StepTrace

#: How often the cluster is asked for its replicas.
LOOK_SECONDS = 0.5


class Cluster(Protocol):
    """Starts, places, watches and ends replicas."""

    async def open(self, config: ServeConfig, progress: Progress) -> None:
        """Make sure that there are replicas with these settings, or soon will be; :class:`ForesayError` if there cannot
        be."""

    async def addresses(self) -> list[Address]:
        """The replicas that take requests. :class:`ForesayError` if none ever will be."""

    async def deploy(self, config: ServeConfig) -> int:
        """Replace the replicas one by one with these settings; returns the deployment's number."""

    async def close(self) -> None:
        """Disconnect; this server uses no replica any more."""


class Fleet(Supervised):
    """A :class:`~foresay.server.engine.generation.TokenEngine` made of replicas. Sequences and pages in an observed
    step's trace are sums over all replicas."""

    def __init__(self, config: ServeConfig, cluster: Cluster) -> None:
        super().__init__()
        self._config, self._cluster = config, cluster
        self._replicas: dict[str, ReplicaClient] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._stranded = InFlights(lambda frame: None, config.max_resumes)  # while there is no replica
        self._router = Router(config.page_size)
        self._unreached: set[str] = set()  # among those listed
        self._moved = 0  # requests that have moved so far

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, reserved: Mapping[str, int] | None = None) -> None:
        """Start replicas or find existing ones; returns at once. reserved: not used."""
        self._begin("starting the replicas")

    async def stop(self) -> None:
        await self._cease()
        for replica in self._replicas.values():
            replica.close()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        await self._cluster.close()
        self._fail(lambda: EngineFailed(f"the server ends; {AGAIN}"))

    def _fail(self, error: Callable[[], Exception]) -> None:
        for flights in self._all_flights():
            flights.fail(error)

    async def _supervise(self) -> None:

        def progress(phase: str, share: float | None) -> None:
            self._set(EngineStatus("loading", phase, share, starts=1))

        try:
            await self._cluster.open(self._config, progress)
            while True:
                self._see(await self._cluster.addresses())
                await asyncio.sleep(LOOK_SECONDS)
        except ForesayError as error:
            self._failure = frames.Failed(str(error), True, usage=isinstance(error, ConfigurationError))
            self._set(EngineStatus("failed", str(error)))

    def _see(self, addresses: Collection[Address]) -> None:
        """Connect to new replicas, and leave those that are to end."""
        listed = {address.name: address for address in addresses}
        self._unreached &= listed.keys()
        for name in self._replicas.keys() - listed.keys():
            self._leave(self._replicas[name])
        for name in listed.keys() - self._replicas.keys():
            replica = ReplicaClient(listed[name], self._config.max_resumes, self._one_ready, self._step)
            self._replicas[name], self._serving[name] = replica, asyncio.create_task(self._serve(replica))

    async def _serve(self, replica: ReplicaClient) -> None:
        """Use a replica until it is lost; its requests then continue elsewhere."""
        name, reason = replica.address.name, "the replica is gone"
        try:
            await replica.until_closed()
        except (OSError, EngineFailed) as error:
            reason = f"the replica {name} cannot be reached ({error})"
            if name not in self._unreached:  # it is tried again and again
                log.warning("%s", reason)
            self._unreached.add(name)
        finally:
            if self._replicas.get(name) is replica:
                del self._replicas[name], self._serving[name]
                replica.lose(reason)
                self._go_on(replica, "died")

    def _leave(self, replica: ReplicaClient) -> None:
        """It is to end: move all its requests."""
        del self._replicas[replica.address.name], self._serving[replica.address.name]
        replica.in_flight.move()
        self._go_on(replica, "replaced")
        replica.close()

    def _go_on(self, replica: ReplicaClient, cause: Cause) -> None:
        """Move the requests of a lost replica to others."""
        going = replica.in_flight.leave()
        for flight in going:
            self._route(flight)
        self._moved += len(going)
        if replica.info is not None:
            log.warning("replica %s %s; %d streams go on", replica.address.name, cause, len(going))
            self._update(cause, len(going))

    def _one_ready(self) -> None:
        """A replica takes requests: give it those that had none."""
        for flight in self._stranded.leave():
            self._route(flight)
        self._update()

    def _update(self, cause: Cause | None = None, resumed: int = 0) -> None:
        """Update ``info`` and ``status`` from all replicas."""
        infos = [replica.info for replica in self.ready if replica.info is not None]
        if infos:
            seqs, tokens = sum(info.max_seqs for info in infos), sum(info.kv_tokens for info in infos)
            longest = min(info.max_model_len for info in infos)
            self.info = replace(infos[0], max_seqs=seqs, kv_tokens=tokens, max_model_len=longest)
        starts = self.status.starts + (cause == "died")
        message = "" if infos else "no replica is ready"
        self._set(EngineStatus("ready" if infos else "down", message, starts=starts, cause=cause, resumed=resumed))

    # -- replicas ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[ReplicaClient]:
        """The replicas that take requests."""
        return [replica for replica in self._replicas.values() if replica.status.state == "ready"]

    def loads(self) -> list[Replica]:
        """The state of each ready replica."""
        return [replica.report_entry for replica in self.ready]

    async def replace(self, config: ServeConfig) -> int:
        """Replace the replicas one by one with other settings; returns how many requests moved."""
        if self.status.state != "ready":
            raise unavailable(self.status)
        before, self._config = self._moved, config
        deployed = await self._cluster.deploy(config)
        while True:
            new = [replica for replica in self.ready if replica.address.deployed >= deployed]
            if new and len(new) == len(self._replicas):
                return self._moved - before
            if self._supervisor is None or self._supervisor.done():
                raise EngineFailed("the replicas were given up meanwhile")
            await asyncio.sleep(LOOK_SECONDS)

    def _step(self, replica: ReplicaClient, trace: StepTrace) -> None:
        if self.observe is not None:
            lasts = [one.last for one in self.ready if one.last is not None]
            names = ("running", "waiting", "pages", "kept_pages")
            together = replace(trace, **{name: sum(getattr(last, name) for last in lasts) for name in names})
            self._notify(self.observe, together)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request, sink: Sink) -> None:
        check_comes(self.status)
        self._route(InFlight(request, sink))

    def cancel(self, id: str) -> None:
        for flights in self._all_flights():
            flights.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        for flights in self._all_flights():
            if id in flights:
                flights.finish(id, at_token)
                return

    def _all_flights(self) -> list[InFlights]:
        return [*(replica.in_flight for replica in self._replicas.values()), self._stranded]

    def _route(self, flight: InFlight) -> None:
        """Send a request to the best replica, or keep it until one is ready. Choices of one prompt stay together."""
        ready, leader = self.ready, flight.request.fork_of
        with_leader = next((one for one in ready if leader is not None and leader in one.in_flight), None)
        if not ready:
            self._stranded.take_over(flight)
            return
        loads = {} if with_leader else {replica.address.name: replica.load for replica in ready}
        chosen = with_leader or self._replicas[self._router.choose(flight.request.prompt, flight.request.salt, loads)]
        chosen.in_flight.take_over(flight)
