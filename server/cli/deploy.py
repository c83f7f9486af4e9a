"""``foresay deploy ray``: the engines of a server as a file for ``serve deploy``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import msgspec

from server.cli.command import Command
from server.settings.config import EngineConfig, ServeConfig
from spec.errors import ConfigurationError

#: What replicas have of a server's settings.
OF_REPLICAS = (*EngineConfig.__struct_fields__, "engine_timeout", "replicas")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=("ray",), help="ray: a config file of Ray Serve, on stdout")


def run(config: ServeConfig, arguments: Namespace) -> int:
    """Print the file."""
    if config.replicas is None:
        raise ConfigurationError("how many engines? say --replicas 2, or --replicas 1-4 to have Ray choose")
    print(serve_file(config), end="")
    return 0


def serve_file(config: ServeConfig) -> str:
    """A config file of Ray Serve, in YAML: the settings of engines that are not the default ones."""
    usual = ServeConfig()
    given = {name: getattr(config, name) for name in OF_REPLICAS if getattr(config, name) != getattr(usual, name)}
    settings = "".join(f"    {name}: {msgspec.json.encode(value).decode()}\n" for name, value in given.items())
    return (
        "# serve deploy THIS_FILE starts the engines; whoever serves them joins:\n"
        f"# foresay serve {config.target} --replicas {config.replicas} --ray-address auto\n"
        "proxy_location: Disabled\n"
        "applications:\n"
        "- name: foresay\n"
        "  route_prefix: null\n"
        "  import_path: server.host.replicas.cluster:build\n"
        f"  args:\n{settings}"
    )


COMMAND = Command(
    "deploy",
    "write what Ray Serve needs to run the engines",
    ("foresay deploy ray --replicas 2", "foresay deploy ray Qwen/Qwen3-8B --replicas 1-4 --draft suffix"),
    ServeConfig,
    run,
    _add_arguments,
)
