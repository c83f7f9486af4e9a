"""``foresay reload``: have a running server go on in another engine."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.cli.command import Command
from server.cli.progress import Stages
from server.settings.config import EngineConfig
from server.settings.fields import settings_of
from spec.errors import ConfigurationError, ForesayError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (%(default)s)")
    parser.add_argument("--model", metavar="NAME", help="which of its models, if it has several")
    parser.add_argument("--admin-key", metavar="KEY", help="its admin key (default: FORESAY_ADMIN_KEY)")


def run(config: EngineConfig, arguments: Namespace) -> int:
    """Ask for the settings that were given as flags, and show what goes on until the engine is ready."""
    given = [name for name in vars(arguments) if name in settings_of(EngineConfig)]
    body = {
        "settings": {name: _seen_from_there(getattr(config, name)) for name in given},
        "model": arguments.model,
        "stream": True,
    }
    last: dict[str, Any] = {}
    with Stages(lines=True) as stages:
        for last in _told(arguments.url, _key(arguments.admin_key), body):
            if last["status"] == "loading":
                stages(last["phase"], last["share"])
    if last.get("status") != "replaced":
        raise _refused(last)
    print(f"{last['model']}: engine replaced after {last['seconds']:.1f} s; {last['moved']} streams go on")
    return 0


def _seen_from_there(value: object) -> object:
    """A file or folder by its whole path: the server may have been started elsewhere."""
    return str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value


def _key(given: str | None) -> str:
    key = given or os.environ.get("FORESAY_ADMIN_KEY")
    if key is None:
        raise ConfigurationError("whose server is it? give its --admin-key, or set FORESAY_ADMIN_KEY")
    return key


def _told(url: str, key: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines that the server answers with; an error is one line."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/admin/reload", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                yield from map(json.loads, answer)
        except urllib.error.HTTPError as error:
            told = json.loads(error.read())["error"]
            yield {"status": "error", "error": {"message": told["message"], "type": told["type"]}}
    except (OSError, ValueError, TypeError, KeyError) as error:  # nobody there, no URL, or not ours
        raise ForesayError(f"--url {url}: no Foresay answers there ({error})") from None


def _refused(last: dict[str, Any]) -> ForesayError:
    error = last.get("error") or {"message": "the server ended before the engine was ready", "type": ""}
    wrong = error["type"] == "invalid_request_error"
    return (ConfigurationError if wrong else ForesayError)(f"{error['message']}; the engine before serves on")


COMMAND = Command(
    "reload",
    "have a running server go on in another engine: its streams go on with the same text",
    (
        "foresay reload --draft Qwen/Qwen3-0.6B",
        "foresay reload --draft ngram --draft-tokens 6 --url http://127.0.0.1:8001",
        "foresay reload ./my-model-v2",
    ),
    EngineConfig,
    run,
    _add_arguments,
)
