"""``foresay serve``: the HTTP server, with the engine in a separate process. ``foresay reload``: replace a running
server's engine. ``foresay deploy ray``: the engines of a server as a file for ``serve deploy``. ``foresay config
show``: the settings in force, as a TOML file that would reproduce them. ``foresay keys``: make API keys, and
list those of a file.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Generator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from foresay.server.cli.command import argument, command
from foresay.server.cli.progress import Stages
from foresay.server.engine_process.child import ahead, uncollected
from foresay.server.settings.config import SECTIONS, EngineConfig, ServeConfig
from foresay.server.settings.fields import Setting, applied_by, settings_of
from foresay.server.settings.load import load
from foresay.server.settings.resolved import check_config
from foresay.server.settings.units import aligned
from foresay.spec.errors import ConfigurationError, ForesayError


@command(ServeConfig)
def serve(config: ServeConfig, arguments: Namespace) -> int:
    """Serve a model over HTTP, with an OpenAI-compatible API.

    foresay serve
    foresay serve Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
    foresay serve ./my-model --draft ngram --draft-tokens 6 --port 8001
    """
    allow_most_files()
    # Several models are loaded on request; a single one is needed at once, and importing takes long.
    alone = not config.models and not config.replicas
    with Stages(lines=True) as stages, ahead(alone) as spawning:
        if alone:
            check_config(config)
        with uncollected():
            from foresay.server.cli import serving
        gc.freeze()
        return serving.serve(config, stages, spawning)


def allow_most_files() -> None:
    """Raise the soft limit of open files to the hard one: every connection needs one, and shells start with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it; then keep the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- foresay reload ----------------------------------------------------------------------------------------------------


#: The default address of a server.
URL = "http://127.0.0.1:8000"


AT = argument("--url", default=URL, metavar="URL", help="the server (%(default)s)")


@command(EngineConfig, elsewhere=True)
@AT
@argument("--model", metavar="NAME", help="which of its models, if it has several")
@argument("--admin-key", metavar="KEY", help="its admin key (default: FORESAY_ADMIN_KEY)")
def reload(config: EngineConfig, arguments: Namespace) -> int:
    """Replace a server's engine; its streams go on with the same text.

    foresay reload --draft Qwen/Qwen3-0.6B
    foresay reload --draft ngram --draft-tokens 6 --url http://127.0.0.1:8001
    foresay reload ./my-model-v2
    """
    given = [name for name in vars(arguments) if name in settings_of(EngineConfig)]
    settings = {name: _seen_from_there(getattr(config, name)) for name in given}
    body = {"settings": settings, "model": arguments.model}
    with Stages(lines=True) as stages:
        stages("replacing the engine")
        last = next(iter(answers(arguments.url, "/admin/reload", admin_key(arguments.admin_key), body)), {})
    if last.get("status") != "replaced":
        raise _refused(last)
    pause = "" if last["pause"] is None else f" after a pause of {last['pause']:.1f} s"
    print(f"{last['model']}: engine replaced after {last['seconds']:.1f} s; {last['moved']} streams go on{pause}")
    return 0


def _seen_from_there(value: object) -> object:
    """Paths become absolute: the server may have been started in another directory."""
    return str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value


def admin_key(given: str | None) -> str:
    """The given admin key, or the one in the environment."""
    key = given or os.environ.get("FORESAY_ADMIN_KEY")
    if key is None:
        raise ConfigurationError("this needs the server's admin key: give --admin-key, or set FORESAY_ADMIN_KEY")
    return key


class ServerGone(ForesayError):
    """No Foresay server answers, or it ended in the middle of an answer."""


def answers(
    url: str,
    path: str,
    key: str | None,
    body: dict[str, Any] | None = None,
    seconds: float | None = None,
    began: Callable[[Any], object] = lambda response: None,
) -> Generator[dict[str, Any], None, None]:
    """The lines or events of the server's response, to a GET if there is no body; an error is one. seconds: timeout of
    each; None: wait forever. began: called with the response once its headers are there."""
    url = url if "://" in url else f"http://{url}"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        try:
            with opened(request, seconds) as answer:
                began(answer)
                for line in map(bytes.strip, answer):
                    data = line.removeprefix(b"data: ")
                    if data and not data.startswith(b":") and data != b"[DONE]":  # an event stream's comments and end
                        yield json.loads(data)
        except urllib.error.HTTPError as error:
            with error:
                error_body = json.loads(error.read())["error"]
            error_body = (
                {"message": error_body, "type": ""} if isinstance(error_body, str) else error_body
            )  # the format of Ollama's routes
            yield {"status": "error", "error": {"message": error_body["message"], "type": error_body["type"]}}
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        words = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
        raise ServerGone(f"--url {url}: no Foresay server answers there ({words})") from None
    except (ValueError, TypeError, KeyError):
        raise ForesayError(f"--url {url}: this is not a Foresay server") from None


def opened(request: urllib.request.Request, seconds: float | None) -> Any:
    """The response, as :func:`urllib.request.urlopen` has it; no proxy (``http_proxy``) is asked for this machine.
    seconds: timeout of each read."""
    host = urlsplit(request.full_url).hostname or ""
    direct = host in ("localhost", "::1") or host.startswith("127.")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else ()))
    return opener.open(request, timeout=seconds)


def answer(
    url: str, path: str, key: str | None, seconds: float | None = None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The server's response, to a GET if there is no body, if it is a single line; raises ForesayError if it is an
    error. seconds: timeout; None: wait forever."""
    found = next(answers(url, path, key, body, seconds), {})
    if "error" in found:
        raise ForesayError(f"--url {url}: {found['error']['message']}")
    return found


def _refused(last: dict[str, Any]) -> ForesayError:
    error = last.get("error") or {"message": "the server ended before the engine was ready", "type": ""}
    wrong = error["type"] == "invalid_request_error"
    return (ConfigurationError if wrong else ForesayError)(f"{error['message']}; the previous engine keeps serving")


# -- foresay deploy ----------------------------------------------------------------------------------------------------


@command(ServeConfig)
@argument("what", metavar="WHAT", choices=("ray",), help="ray: a config file of Ray Serve, on stdout")
def deploy(config: ServeConfig, arguments: Namespace) -> int:
    """Write what Ray Serve needs to run the engines.

    foresay deploy ray --replicas 2
    foresay deploy ray Qwen/Qwen3-8B --replicas 1-4 --draft suffix
    """
    if config.replicas is None:
        raise ConfigurationError("how many engines? say --replicas 2, or --replicas 1-4 to let Ray choose")
    print(serve_file(config), end="")
    return 0


def serve_file(config: ServeConfig) -> str:
    """A config file of Ray Serve, in YAML, with the engines' non-default settings."""
    usual = ServeConfig()
    deployed = (*applied_by("engine", "text", "cluster"), "replicas")
    given = {name: getattr(config, name) for name in deployed if getattr(config, name) != getattr(usual, name)}
    settings = "".join(f"    {name}: {msgspec.json.encode(value).decode()}\n" for name, value in given.items())
    return (
        "# serve deploy THIS_FILE starts the engines; a server joins them with:\n"
        f"# foresay serve {config.target} --replicas {config.replicas} --ray-address auto\n"
        "proxy_location: Disabled\n"
        "applications:\n"
        "- name: foresay\n"
        "  route_prefix: null\n"
        "  import_path: foresay.server.replicas.cluster:build\n"
        f"  args:\n{settings}"
    )


def _toml(value: Any) -> str:
    """A value in TOML, which equals JSON for strings, numbers, booleans and lists of those."""
    return msgspec.json.encode(value).decode()


def _line(setting: Setting, value: Any, origin: str | None) -> str:
    """``key = value``, commented out if there is no value to write."""
    hidden = setting.is_secret and value
    line = f"# {setting.name} =" if value is None else f"{setting.name} = {_toml(value)}"
    if hidden:
        line = f"# {setting.name} is set; its value is not shown"
    return line if origin is None else f"{line}  # {origin}"


# -- foresay config ----------------------------------------------------------------------------------------------------


@command(None, name="config")
@argument("action", nargs="?", default="show", metavar="ACTION", choices=("show",), help="show: print them (default)")
@argument("--origin", action="store_true", help="show where each value comes from")
@argument("--config", metavar="FILE", help="a TOML file to read (default: FORESAY_CONFIG)")
def show_config(config: None, arguments: Namespace) -> int:
    """Show the settings in force.

    foresay config show --origin
    foresay config show --config foresay.toml
    """
    for section, owner in SECTIONS.items():
        loaded = load(owner, {}, os.environ, arguments.config)
        print(f"[{section}]")
        for name, setting in settings_of(owner).items():
            if setting.section == section:
                origin = loaded.origins.get(name, "default") if arguments.origin else None
                print(_line(setting, getattr(loaded.config, name), origin))
        print()
    _print_models(load(ServeConfig, {}, os.environ, arguments.config).config)
    return 0


def _print_models(config: ServeConfig) -> None:
    """A section for each model: its settings that differ from those of ``[engine]``."""
    for model, own in config.models.items():
        print(f"[models.{_toml(model)}]")
        for name, setting in settings_of(ServeConfig).items():
            value = getattr(own, name)
            if setting.section == "engine" and value is not None and value != getattr(config, name):
                print(_line(setting, value, None))
        print()


# -- foresay keys ------------------------------------------------------------------------------------------------------


@command(None)
@argument(
    "action",
    metavar="ACTION",
    choices=("new", "list"),
    help="new: make a key, show it once on stderr and print its entry for the key file; list: show the names that have "
    "keys",
)
@argument(
    "name",
    nargs="?",
    metavar="NAME",
    help="the owner of the key (not for list): 1 to 64 letters, digits, '.', '@', '-' and '_'",
)
@argument("--api-key-file", metavar="FILE", help="list: the file of keys (default: the one in the settings)")
@argument("--config", metavar="FILE", help="a TOML file with settings (default: FORESAY_CONFIG)")
def keys(config: None, arguments: Namespace) -> int:
    """Make API keys for the server, and list them.

    foresay keys new alice
    foresay keys list --api-key-file keys.toml
    """
    from foresay.server.gateway.keys import entry_text, new_key

    action, name = arguments.action, arguments.name
    if (action == "list") != (name is None):
        raise ConfigurationError(
            f"{action} takes no name" if name else f"{action} needs a name: foresay keys {action} NAME"
        )
    if action == "list":
        _list(_file(arguments))
    else:
        key = new_key()
        print(entry_text(name, key), end="")
        print(f"{name}'s key, which is not shown again: {key}", file=sys.stderr)
    return 0


def _list(path: Path) -> None:
    """Print a line for each key: its name, its id, its own limit."""
    from foresay.server.gateway.keys import read

    entries = read(path)
    limits = [entry.max_requests_per_minute for entry in entries]
    words = ["" if most is None else f"max_requests_per_minute {most or 'none'}" for most in limits]
    for line in aligned([(entry.name, entry.id, limit) for entry, limit in zip(entries, words, strict=True)]):
        print(line)
    print(f"{len(entries) or 'no'} key{'' if len(entries) == 1 else 's'} in {path}", file=sys.stderr)


def _file(arguments: Namespace) -> Path:
    """The named file, else the one in the settings."""
    named = arguments.api_key_file or load(ServeConfig, {}, os.environ, arguments.config).config.api_key_file
    if named is None:
        raise ConfigurationError("list needs a file of keys: --api-key-file FILE")
    return Path(named)
