"""``foresay serve`` from loaded settings to the exit status: progress, the banner once it is ready (what runs, why,
whether it is exact, and one line to try), and the end of the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec

from foresay.server.catalog.hub import resolve
from foresay.server.cli.command import report_error
from foresay.server.cli.progress import Stages
from foresay.server.engine.generation import EngineStatus
from foresay.server.engine_process.child import Spawned, spawn
from foresay.server.http.auth import is_loopback
from foresay.server.http.life import CLOSING_SECONDS, WORKER_NAME, run_server
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import cached_target, model_names
from foresay.server.settings.units import aligned, span_in_words
from foresay.spec.request import EngineInfo


def serve(config: ServeConfig, stages: Stages, spawn: Callable[[], Spawned] = spawn) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status. Raises what :func:`run_server` raises.

    stages: called with the progress until the engine is ready. spawn: starts an engine process.
    """

    def ready(info: EngineInfo | None, port: int) -> None:
        stages.close()
        if info is None:
            show_models(config, port)
        else:
            show(info, config, model_names(config)[0], port)

    def changed(status: EngineStatus) -> None:
        if status.state == "loading":
            stages(status.message, status.share)

    try:
        with stages:
            asyncio.run(run_server(config, ready, changed, spawn))
        print("Foresay stopped.", file=sys.stderr)
        return 0
    finally:
        _leave_the_busy()


def _leave_the_busy() -> None:
    """Exit at once if a thread does not end, such as one that renders an endless template: Python would wait for it."""
    deadline = time.monotonic() + CLOSING_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(WORKER_NAME):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                error = sys.exception()
                status = 0 if error is None else report_error("serve", error)
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)


# -- the banner --------------------------------------------------------------------------------------------------------


Row = tuple[str, str]


def rows(info: EngineInfo) -> list[Row]:
    """The banner as name and value, in order."""
    return [
        ("target", info.target),
        ("drafter", _reasoned((info.draft or info.drafter) + _shape(info), info.drafter_reason)),
        ("dtype", _reasoned(f"{info.dtype} on {info.device}", info.dtype_reason)),
        *([("weights", info.quantization)] if info.quantization else []),
        *([("activations", _reasoned(_activations(info), info.activations_reason))] if info.quantization else []),
        ("exact", _reasoned("yes" if info.exact else "no", info.exact_reason)),
        *([("bits", _bits(info))] if info.bits else []),
        (
            "KV cache",
            f"{info.kv_tokens:,} tokens{_kept(info)} in pages of {info.page_size}, "
            f"up to {info.max_seqs} sequences at once",
        ),
        *([("disk", f"KV of prompts and answers, {info.kv_disk}")] if info.kv_disk else []),
        *([("memory", info.memory)] if info.memory else []),
        ("context", f"{info.max_model_len:,} tokens"),
    ]


def addresses(url: str) -> list[Row]:
    """The addresses for people and programs."""
    return [("page", f"{url}/"), ("API", f"{url}/v1")]


def access(config: ServeConfig) -> str:
    """Who may use the server."""
    if not config.api_key and config.api_key_file is None:
        return "this machine only" if is_loopback(config.host) else "anyone who can reach it; no API key is needed"
    return "only with an API key"


def try_line(url: str, model: str, keyed: bool = False, chats: bool = False) -> str:
    """A command that streams an answer from this server. keyed: it needs a key, taken from FORESAY_API_KEY. chats: the
    model has a chat template."""
    question = [{"role": "user", "content": "What is photosynthesis?"}]
    given: dict[str, Any] = {"messages": question, "temperature": 0.7} if chats else {"prompt": "Once upon a time"}
    path = "chat/completions" if chats else "completions"
    body = {"model": model, **given, "max_tokens": 100, "stream": True}
    sent = shlex.quote(msgspec.json.encode(body).decode())
    key = ' -H "Authorization: Bearer $FORESAY_API_KEY"' if keyed else ""
    return f"curl -N {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {sent}"


def _chats(config: ServeConfig) -> bool:
    """Whether the target's files have a chat template; those of several models may not be on disk yet."""
    source = None if config.models else cached_target(config)
    if source is None:
        return False
    directory = resolve(source)
    tokenizer = directory / "tokenizer_config.json"
    inside = tokenizer.exists() and b'"chat_template"' in tokenizer.read_bytes()
    return inside or (directory / "chat_template.jinja").exists()


def warnings(config: ServeConfig) -> list[str]:
    """Warnings for the operator about the address it listens on."""
    if is_loopback(config.host):
        return []
    where = f"listening on {config.host or 'all addresses'}"
    if not config.api_key and config.api_key_file is None:
        return [
            f"{where} WITHOUT AN API KEY: anyone who can reach this machine can use the model. "
            "Make a key (foresay keys new NAME >> keys.toml) and start with --api-key-file keys.toml, or listen on "
            "127.0.0.1"
        ]
    if config.ssl_certfile is None:
        return [f"{where} without HTTPS: keys and texts cross the network unencrypted; see --ssl-certfile"]
    return []


def show(info: EngineInfo, config: ServeConfig, model: str, port: int, out: TextIO | None = None) -> None:
    """Print the banner on stderr.

    model: the name for clients. port: the actual one, which differs from the setting if that was 0.
    """
    _announce(rows(info), info.warnings, config, model, port, out or sys.stderr)


def show_models(config: ServeConfig, port: int, out: TextIO | None = None) -> None:
    """The same for several models, each loaded on its first request."""
    table = [("model", f"{name}: {one.target}") for name, one in config.models.items()]
    _announce([*table, ("loaded", _how_long(config))], (), config, next(iter(config.models)), port, out or sys.stderr)


def _how_long(config: ServeConfig) -> str:
    """When models are loaded and unloaded."""
    most = config.max_loaded_models
    together = "as many as there is room for" if most is None else f"at most {most} at the same time"
    left = (
        ""
        if config.idle_seconds is None
        else f", each until {span_in_words(config.idle_seconds)} pass without a request"
    )
    return f"on first use, {together}{left}"


def _announce(
    table: Sequence[Row], notes: Sequence[str], config: ServeConfig, model: str, port: int, out: TextIO
) -> None:
    """Print the table, addresses and access, warnings, and a command to try."""
    url = config.base_url(port)
    table, notes = [*table, *addresses(url), ("access", access(config))], [*notes, *warnings(config)]
    line = try_line(url, model, bool(config.api_key or config.api_key_file), _chats(config))
    lines = aligned([*table, *(("warning", note) for note in notes)])
    print("\n".join(["Foresay is ready.", *lines, "try it:", f"  {line}"]), file=out, flush=True)


def _reasoned(value: str, reason: str) -> str:
    if not reason:
        return value
    return f"{value}: {reason}" if "(" in reason else f"{value} ({reason})"


def _kept(info: EngineInfo) -> str:
    return f" of {info.kv_token_bytes:,} bytes ({info.kv_dtype})" if info.kv_token_bytes else ""


def _bits(info: EngineInfo) -> str:
    own = f"texts of this kind of {'GPU' if info.bits == 'gpu' else 'processor'}"
    meaning = "the same text on every CPU" if info.bits.startswith("portable") else own
    return f"{info.bits} ({meaning}; fingerprint {info.fingerprint})"


def _activations(info: EngineInfo) -> str:
    return "not rounded" if info.activations == "model" else info.activations


def _shape(info: EngineInfo) -> str:
    widths = info.draft_shape
    if not widths:
        return ""
    if info.chosen:
        return f", up to {len(widths)} tokens ahead, as many as pay at each step"
    if set(widths) == {1}:
        return f", {len(widths)} tokens ahead"
    return f", a tree of {','.join(map(str, widths))}"
