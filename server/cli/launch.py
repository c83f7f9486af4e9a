"""``foresay launch``: runs a coding agent on a Foresay server, which is started for it if there is none yet.
The agent is configured only by its environment and command; nothing else is changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foresay.server.catalog import catalog
from foresay.server.catalog.catalog import Agent, known_agents, models_for_agents
from foresay.server.cli.command import argument, arguments, command
from foresay.server.cli.serve import answer, opened
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.fields import settings_of
from foresay.spec.errors import ConfigurationError, ForesayError

#: Most output tokens that an agent may request, unless the server says how many, and this fraction of a short context.
OUTPUT, PART = 8192, 4
POLL_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 0.2, 10.0, 15.0
#: How many of the last lines to show of a server that ended too early.
_LINES = 20


def _add_agent(parser: ArgumentParser) -> None:
    agents = tuple(known_agents())
    parser.add_argument("agent", metavar="AGENT", choices=agents, help=", ".join(agents))


@command(ServeConfig, passes_on=True)
@arguments(_add_agent)
@argument(
    "--url", metavar="URL", help="use the server that runs there (else one at --host and --port)", after_target=True
)
@argument("--model", metavar="NAME", help="which of its models, if it has several", after_target=True)
def launch(config: ServeConfig, arguments: Namespace) -> int:
    """Start a coding agent on a local model, with a server for it.

    foresay launch claude Qwen/Qwen3-8B
    foresay launch codex --url http://127.0.0.1:8001
    foresay launch claude Qwen/Qwen3-8B --quantize int8 -- -p "What does this project do?"
    """
    agent = known_agents()[arguments.agent]
    if agent.cannot:
        raise ConfigurationError(f"{agent.title} cannot be used: {agent.cannot}")
    if shutil.which(agent.command[0]) is None:
        raise ForesayError(f"{agent.command[0]} is not installed; to install {agent.title}: {agent.install}")
    with (
        _handling(lambda number: sys.exit(128 + number), _ENDING),
        _server(config, arguments, agent) as url,
        tempfile.TemporaryDirectory(prefix="foresay-") as folder,
    ):
        values = _values(url, config, arguments, agent)
        print(f"foresay launch: {agent.title} uses {values['model']} at {url}", file=sys.stderr)
        command, variables = agent.started(values, Path(folder))
        return _run([*command, *arguments.words], variables)


# -- the server --------------------------------------------------------------------------------------------------------


@contextmanager
def _server(config: ServeConfig, arguments: Namespace, agent: Agent) -> Iterator[str]:
    """The address of the running server, or of one that is started, and ended afterwards."""
    url = arguments.url or config.base_url(config.port)
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    _port(url)  # refuses what is none
    health = _health(url, patient=False)
    if health is not None:
        _check_same(health, url, arguments)
        _wait(url)
        with _shared(url, ours=False):
            yield url
        return
    if arguments.url:
        raise ForesayError(f"--url {url}: no Foresay server answers there")
    if "target" not in arguments and config.target == ServeConfig().target and not config.models:
        raise ConfigurationError(f"no server answers at {url}: which model to serve? {_advice(agent, arguments.agent)}")
    with _started(_given(arguments)) as process:
        _wait(url, process)
        with _shared(url, ours=True):
            yield url


@contextmanager
def _shared(url: str, ours: bool) -> Iterator[None]:
    """Hold a lock while an agent uses a server. A server that we started is kept until no other agent uses it."""
    lock_file = Path(tempfile.gettempdir()) / f"foresay-{os.getuid()}-{_port(url)}.lock"
    with open(lock_file, "w", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not ours:
                return
            print("foresay launch: the server ends with the last agent that uses it, or at Ctrl-C", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock_file.unlink(missing_ok=True)


def _port(url: str) -> int:
    """The port of an address, or its scheme's. Raises ConfigurationError if that is no number of a port."""
    parts = urlsplit(url)
    with suppress(ValueError):
        return parts.port or {"https": 443}.get(parts.scheme, 80)
    raise ConfigurationError(f"--url {url}: the port must be a number up to 65535")


@contextmanager
def _started(flags: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``foresay serve``, detached from the terminal and its Ctrl-C; reports if it ended too early. -P: nothing is
    imported from the user's project."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "foresay.server.cli", "serve", "--any-model-name", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=_LINES)
    reading = threading.Thread(target=_show, args=(process, last), name="server's output", daemon=True)
    reading.start()
    try:
        yield process
    finally:
        lost = _end(process)
        reading.join(POLL_SECONDS)
    if lost is not None:
        words = f"foresay launch: the server ended while it was needed (exit status {lost})"
        print("".join(last) + words, file=sys.stderr)


def _show(process: subprocess.Popen[bytes], last: deque[str]) -> None:
    """Show a server's output until it is ready; then the terminal is the agent's. last: keeps the last lines."""
    assert process.stdout is not None, "it is a pipe"
    loading = True
    with process.stdout as lines:
        for line in lines:
            last.append(line.decode(errors="replace"))
            loading = loading and not line.startswith(b"Foresay is ready")
            if loading:
                sys.stderr.write(last[-1])


def _wait(url: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a server takes requests; raises ForesayError if it will not. process: the server's, if we started
    it: while it lives, no answer says only that the machine is busy."""
    while (status := (_health(url) or {}).get("status")) not in ("ok", "unloaded"):
        if process is not None and process.poll() is not None:
            raise ForesayError(f"the server ended before it was ready (exit status {process.returncode})")
        if status in ("failed", "draining") or (status is None and process is None):
            raise ForesayError(f"the server at {url} takes no requests: {status or 'it is gone'}")
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a server, with its child processes; returns its exit status if it ended on its own, None if we ended it. One
    that something else kills is a while in dying, in which it seems to run."""
    ended = process.poll() is not None
    process.terminate()
    try:
        status = process.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    return status if ended or (status < 0 and status != -signal.SIGTERM) else None


def _given(arguments: Namespace) -> list[str]:
    """The settings that were given as flags, unchanged."""
    known, words = settings_of(ServeConfig), [] if arguments.config is None else ["--config", arguments.config]
    for name, value in vars(arguments).items():
        if name == "target":
            words.insert(0, value)
        elif name in known and known[name].is_switch:
            words.append(known[name].flag if value else known[name].flag.replace("--", "--no-", 1))
        elif name in known:
            words += (f"{known[name].flag}={one}" for one in (value if known[name].is_list else [value]))
    return words


def _check_same(health: dict[str, Any], url: str, arguments: Namespace) -> None:
    """Raise if another target is requested than the one already served."""
    served = health.get("target") or health.get("model")
    target = getattr(arguments, "target", None)
    if target is not None and Path(target).name != Path(str(served)).name:
        raise ConfigurationError(
            f"{url} serves {served} already: leave out {target} to use it, or start a second server at another --port"
        )


def _health(url: str, patient: bool = True) -> dict[str, Any] | None:
    """The server's health report; None if nobody answers, or, with patience, none comes in time. Raises ForesayError
    for that without patience, and for anything but a Foresay server."""
    try:
        try:
            with opened(urllib.request.Request(f"{url}/health"), ANSWER_SECONDS) as answer:
                report = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                report = json.loads(error.read())
        report["engine_starts"]
    except (OSError, IncompleteRead) as error:
        why = getattr(error, "reason", error)
        passing = (TimeoutError, ConnectionError, IncompleteRead) if patient else ConnectionRefusedError
        if isinstance(why, passing):
            return None
        raise ForesayError(f"{url} cannot be reached: {why}") from None
    except (HTTPException, ValueError, TypeError, KeyError):
        raise ForesayError(f"{url} is used by something other than Foresay: give another --port") from None
    return dict(report)


# -- its model ---------------------------------------------------------------------------------------------------------


def _values(url: str, config: ServeConfig, arguments: Namespace, agent: Agent) -> dict[str, str | int]:
    """The values for the agent's configuration. Raises ConfigurationError if the model does not suffice for it."""
    key = config.api_key[0] if config.api_key else "none"
    known = {card["id"]: card for card in answer(url, "/v1/models", key, ANSWER_SECONDS)["data"]}
    name = arguments.model or next(iter(known))
    if name not in known:
        raise ConfigurationError(f"--model {name}: {url} serves {', '.join(known)}")
    context = known[name].get("max_model_len")
    can = answer(url, "/api/show", key, ANSWER_SECONDS, {"model": name})["capabilities"]
    lacks = [] if "tools" in can or not agent.tools else ["a chat template with tools"]
    if context and context < agent.tokens:
        lacks.append(f"a context of {agent.tokens:,} tokens (it has {context:,})")
    if lacks and not config.anyway:
        raise ConfigurationError(
            f"{name} does not suffice: {agent.title} needs {' and '.join(lacks)}. {_advice(agent, arguments.agent)}; "
            "--anyway starts it nevertheless"
        )
    if agent.tools and known[name].get("rarely_calls_tools"):
        words = f"{name} rarely calls tools, without which {agent.title} does little"
        print(f"foresay launch: {words}. {_advice(agent, arguments.agent)}", file=sys.stderr)
    context = context or agent.tokens
    output = min(known[name].get("max_tokens", OUTPUT), context // PART)
    return {"url": url, "key": key, "model": name, "context": context, "output": output}


def _advice(agent: Agent, name: str) -> str:
    """A command that serves a sufficient model on this machine."""
    from foresay.server.cli.models import WEIGHTS, flags, here

    device = here()
    for target in map(catalog.known_targets().__getitem__, models_for_agents("gpu" if device.is_gpu else "cpu")):
        for weights in WEIGHTS:
            words = flags(target, weights, None, device, agent.tokens)
            if words is not None:
                return f"This fits here: {shlex.join(['foresay', 'launch', name, target.id, *words])}"
    return "Of the known models none that suffices fits this machine (foresay models)"


# -- the agent ---------------------------------------------------------------------------------------------------------

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def _run(command: list[str], variables: Mapping[str, str]) -> int:
    """Run the agent on this terminal until it ends; returns its exit status. Ctrl-C, which the terminal also sends to
    it, is only for it, and signals that would end us are passed on to it."""
    taken = {name for name, value in variables.items() if not value}
    environment = {name: value for name, value in {**os.environ, **variables}.items() if name not in taken}
    with _handling(lambda number: None, (signal.SIGINT,)):
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise ForesayError(f"{command[0]} cannot be run: {error.strerror}") from None
        with process, _handling(process.send_signal, _ENDING):
            status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _handling(handle: Callable[[int], object], signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Handle signals, unless they are ignored, as under nohup."""
    before = {number: signal.getsignal(number) for number in signals}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, lambda number, frame: handle(number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
