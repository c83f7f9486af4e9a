"""Replicas on Ray Serve, which starts, places, watches, scales, drains and updates them. Only this module imports Ray,
only with ``--replicas``, and in a separate process (:mod:`foresay.server.replicas.cluster_process`).

A deployment hosts engines, one in each replica. Settings and the replicas' addresses go over Ray; requests and tokens
go as frames, as with any engine (docs/scale.md has why).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from typing import Any

import ray
from msgspec.structs import replace
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from foresay.server.replicas.hosted import Address, Hosted
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.fields import applied_by
from foresay.server.settings.load import load
from foresay.spec.errors import ConfigurationError, ForesayError

APPLICATION = "foresay"
#: Environment of a Ray started here: no usage reports, and no lower CPU priority for engines.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
#: How long replicas may take to report their addresses.
ANSWER_SECONDS = 5.0
#: How long a replica that is to end, and is no longer listed, waits for front doors to leave.
LEAVING_SECONDS = 1.5
#: Target load of replicas: above it, one more is started.
FULL = 0.75


@serve.deployment(
    name="engine",
    max_ongoing_requests=100,  # not requests for tokens: only for its address
    logging_config={"enable_access_log": False},
    max_constructor_retry_count=2,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_period_s=2.0,
    health_check_timeout_s=10.0,
)
class EngineActor:
    """A replica. host: the address it listens on; None: its node's. deployed: see :class:`Hosted`."""

    async def __init__(self, config: ServeConfig, host: str | None, deployed: int) -> None:  # type: ignore[misc]
        name = serve.get_replica_context().replica_id.unique_id
        host = host or ray.util.get_node_ip_address()
        self._hosted = Hosted(config, name, host, secrets.token_bytes(32), deployed)
        self._slots = config.max_seqs
        try:
            await self._hosted.open()
        except BaseException:
            await self._hosted.close()
            raise

    async def address(self) -> Address:
        """Where front doors reach its engine."""
        return self._hosted.address

    async def check_health(self) -> None:
        """Ray replaces a replica that raises here three times."""
        status = self._hosted.status
        if status.state not in ("ready", "loading"):
            raise RuntimeError(f"the engine is {status.state}: {status.message}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Its load for the autoscaler, relative to its capacity."""
        return {"full": self._hosted.load / self._slots}

    async def __del__(self) -> None:
        if hasattr(self, "_hosted"):
            await asyncio.sleep(LEAVING_SECONDS)
            await self._hosted.close()


def as_full(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas that keeps their load below :data:`FULL`."""
    full = sum((context.aggregated_metrics or {}).get("full", {}).values())
    wanted = max(ceil(full / FULL), context.capacity_adjusted_min_replicas)
    return min(wanted, context.capacity_adjusted_max_replicas), {}


def application(config: ServeConfig, replicas: str, host: str | None = None, deployed: int = 1) -> serve.Application:
    """What Serve runs. replicas: their number, or minimum and maximum (``2-4``)."""
    least, _, most = replicas.partition("-")
    scaling: dict[str, Any] = {"num_replicas": int(least)}
    if most:
        policy = {"policy_function": f"{__name__}:as_full"}
        bounds = AutoscalingConfig(min_replicas=int(least), max_replicas=int(most), policy=policy)
        scaling = {"autoscaling_config": bounds}
    config = ServeConfig(**{name: getattr(config, name) for name in applied_by("engine", "text", "cluster")})
    resources = needs(config, int(least))
    threads = max(1, int(resources["num_cpus"]))
    config = config if config.threads is not None else replace(config, threads=threads)
    # With a version, Serve restarts no replica if only their number changes.
    made = EngineActor.options(version=str(deployed), _internal=True, ray_actor_options=resources, **scaling)  # type: ignore[attr-defined]
    return made.bind(config, host, deployed)


def needs(config: ServeConfig, replicas: int) -> dict[str, float]:
    """What a replica takes of a node: its threads, or an even share of the smallest node; and a GPU if there are
    any."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = min((int(node.get("CPU", 0)) for node in nodes), default=1)
    resources: dict[str, float] = {"num_cpus": config.threads or max(1, cpus // ceil(replicas / max(1, len(nodes))))}
    if config.device == "cuda" or (config.device == "auto" and any(node.get("GPU") for node in nodes)):
        resources["num_gpus"] = 1
    return resources


def build(settings: Mapping[str, Any]) -> serve.Application:
    """The application of a Serve config file (``foresay deploy ray``). settings: by name, including ``replicas``."""
    config = load(ServeConfig, settings, {}, given_as="argument").config
    return application(config, config.replicas or "1")


class RayServe:
    """What :class:`~foresay.server.replicas.cluster_process.ClusterProcess` calls in the other process."""

    def __init__(self, replicas: str, address: str | None) -> None:
        self._replicas, self._address = replicas, address
        self._host = None if address else "127.0.0.1"
        self._known: list[Address] = []
        self._opening: asyncio.Task[None] | None = None
        self._config: ServeConfig | None = None
        self._handle: Any = None

    async def open(self, config: ServeConfig) -> None:
        """Start or join Ray, and deploy unless that was done."""
        self._config = config
        self._opening = asyncio.create_task(asyncio.to_thread(self._join, config))
        await asyncio.shield(self._opening)

    def _join(self, config: ServeConfig) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        os.environ.update(ENVIRONMENT | os.environ)
        try:
            _connect(self._address)
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            where = f"--ray-address {self._address}" if self._address else "Ray"
            raise ForesayError(f"{where} cannot be reached or started: {error}") from None
        serve.start(proxy_location="Disabled")
        if APPLICATION not in serve.status().applications:
            self._run(application(config, self._replicas, self._host), wait=False)
        self._handle = serve.get_app_handle(APPLICATION)

    def _run(self, made: serve.Application, wait: bool) -> None:
        target = serve.RunTarget(target=made, name=APPLICATION, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=wait)

    async def addresses(self) -> list[Address]:
        """The replicas that take requests; the last known ones if Ray or one of them does not answer."""
        try:
            requested = self._handle.broadcast("address")
            answers = await requested.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError, RuntimeError) as error:
            if isinstance(error, RayServeException) or not self._known:
                await self._check()
            return self._known
        found = [answer for answer in answers if isinstance(answer, Address)]
        names = {address.name for address in found}
        silent = [address for address in self._known if address.name not in names] if len(found) < len(answers) else []
        self._known = [*found, *silent]
        return self._known

    async def _check(self) -> None:
        """Raise if there will be no replica."""
        status = (await asyncio.to_thread(serve.status)).applications.get(APPLICATION)
        if status is None:
            raise ForesayError(f"Ray Serve has no application {APPLICATION!r} any more")
        if status.status == ApplicationStatus.DEPLOY_FAILED and not self._known:
            raise ConfigurationError(_why(status))

    async def deploy(self, config: ServeConfig) -> int:
        """A rolling update by Serve, rolled back if no replica with these settings becomes ready."""
        assert self._config is not None, "it was opened"
        last = max(address.deployed for address in self._known)
        replicas = self._replicas if "-" in self._replicas else str(len(self._known))  # may have been scaled by hand
        made = application(config, replicas, self._host, last + 1)
        try:
            await asyncio.to_thread(self._run, made, True)
        except (RayError, RayServeException, RuntimeError):
            status = (await asyncio.to_thread(serve.status)).applications[APPLICATION]
            before = application(self._config, replicas, self._host, last)
            await asyncio.to_thread(self._run, before, False)
            raise ConfigurationError(_why(status)) from None
        self._config = config
        return last + 1

    async def close(self) -> None:
        """Leave Ray; ends it if it was started here."""
        if self._opening is None:
            return
        with suppress(ForesayError):
            await self._opening
        await asyncio.to_thread(ray.shutdown)


def _connect(address: str | None) -> None:
    common = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": APPLICATION}
    if address is not None:
        ray.init(address=address, **common)
    else:
        ray.init(address="local", include_dashboard=False, object_store_memory=100_000_000, **common)


def _why(status: Any) -> str:
    """What Serve reports about replicas that do not become ready: the last line of the exception."""
    messages = [status.message, *(deployment.message for deployment in status.deployments.values())]
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if "Error" in line.partition(":")[0]]
    return f"no replica becomes ready: {(raised or lines or ['Ray Serve says nothing'])[-1]}"
