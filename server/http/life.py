"""The life of a server: it listens at once, loads, serves until a signal comes, and drains."""

from __future__ import annotations

import asyncio
import errno
import signal
import ssl
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from foresay.server.engine.generation import EngineStatus
from foresay.server.engine_process.child import Spawned, spawn
from foresay.server.http.app import ACCESS_LOG, HTTP_LOG, create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.metrics import log as speculation_log
from foresay.server.models import residency
from foresay.server.models.models import Models
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.request import EngineInfo

CLOSING_SECONDS = 2.0
#: Prefix of the names of threads other than the event loop's.
WORKER_NAME = "beside the event loop"


async def run_server(
    config: ServeConfig,
    on_ready: Callable[[EngineInfo | None, int], None],
    on_status: Callable[[EngineStatus], None],
    spawn: Callable[[], Spawned] = spawn,
) -> None:
    """Listen at once, load, call ``on_ready`` with the engine's info (None if models are loaded on request) and the
    port, serve until a signal, drain.

    on_status: called with every change of an engine's status. spawn: starts an engine process.
    Raises :class:`ForesayError` if the port is taken or the engine can never start.
    """
    threads = ThreadPoolExecutor(thread_name_prefix=WORKER_NAME)
    asyncio.get_running_loop().set_default_executor(threads)
    models = Models.of(config, on_status, spawn)
    auth, tls = AuthMiddleware.of(config), context(config)
    if config.access_log:
        speculation_log.to_stderr(ACCESS_LOG, "%(asctime)s %(message)s")
    speculation_log.to_stderr(residency.log)
    if config.log_stats:
        speculation_log.to_stderr()
    runner = _runner(models, auth)
    await runner.setup()
    try:
        port = await _listen(runner, config, tls)
        stop, hurry = asyncio.Event(), asyncio.Event()  # set by the first signal, and by the second
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        await models.start()
        await _until_stopped(models, lambda info: on_ready(info, port), stop)
        await _drain(models, config.drain_seconds, hurry)
    finally:
        await models.stop()
        await runner.cleanup()
        threads.shutdown(wait=False, cancel_futures=True)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # which the loop waits for when it closes


def _runner(models: Models, auth: AuthMiddleware) -> web.AppRunner:
    # Without handler_cancellation a client that leaves during a long prefill is noticed only at the first write.
    return web.AppRunner(
        create_app(models, auth),
        handler_cancellation=True,
        auto_decompress=False,  # aiohttp would do it before the key is checked
        logger=HTTP_LOG,
        access_log=None,
        shutdown_timeout=CLOSING_SECONDS,
    )


async def _until_stopped(models: Models, on_ready: Callable[[EngineInfo | None], None], stop: asyncio.Event) -> None:
    """Load, then wait for the signal, which may come first. Raises the error that ends the supervision of the
    models."""
    waits: tuple[Coroutine[None, None, Any], ...] = (models.arrived(), stop.wait(), models.until_ended())
    loading, stopped, ended = tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done() and not ended.done():
            on_ready(loading.result())
            await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(models: Models, seconds: float, hurry: asyncio.Event) -> None:
    """Let running requests finish; a second signal ends them."""
    draining, hurried = asyncio.create_task(models.drain(seconds)), asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()
        await models.drain(0.0)


async def _listen(runner: web.AppRunner, config: ServeConfig, tls: ssl.SSLContext | None) -> int:
    """Open the port; returns its number."""
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
    except OSError as error:
        raise ForesayError(_unheard(config, error)) from error
    return int(runner.addresses[0][1])


def _unheard(config: ServeConfig, error: OSError) -> str:
    """Why the port cannot be opened, and what to do."""
    where = f"port {config.port} on {config.host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use: stop what listens there, or choose another port with --port (0 takes a free one)"
    return f"cannot listen on {where} ({error.strerror}): choose others with --host and --port"


# -- HTTPS -------------------------------------------------------------------------------------------------------------


def context(config: ServeConfig) -> ssl.SSLContext | None:
    """The TLS context to listen with (1.2 or newer); None for plain HTTP. Raises :class:`ConfigurationError` for bad
    files."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files = f"ssl_certfile ({config.ssl_certfile}) and ssl_keyfile ({config.ssl_keyfile})"
    try:
        made.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")  # never ask on the terminal
    except ssl.SSLError as error:
        raise ConfigurationError(f"{files} cannot be used: {error.reason or 'not a matching PEM pair'}") from None
    except OSError as error:
        raise ConfigurationError(f"{files} cannot be read: {error.strerror}") from None
    return made
