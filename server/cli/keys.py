"""``foresay keys``: make API keys, hash your own, list those of a file."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from getpass import getpass
from pathlib import Path

from foresay.server.cli.command import argument, command
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.load import load
from foresay.spec.errors import ConfigurationError


@command(None, name="keys")
@argument(
    "action",
    metavar="ACTION",
    choices=("new", "hash", "list"),
    help="new: make a key, show it once on stderr and print its entry for the key file; hash: print the entry of a "
    "key of yours, read from stdin; list: show the names that have keys",
)
@argument(
    "name",
    nargs="?",
    metavar="NAME",
    help="the owner of the key (not for list): 1 to 64 letters, digits, '.', '@', '-' and '_'",
)
@argument("--api-key-file", metavar="FILE", help="list: the file of keys (default: the one in the settings)")
@argument("--config", metavar="FILE", help="a TOML file with settings (default: FORESAY_CONFIG)")
def run(config: None, arguments: Namespace) -> int:
    """Make API keys for the server, and list them.

    foresay keys new alice
    foresay keys hash alice
    foresay keys list --api-key-file keys.toml
    """
    from foresay.server.gateway import keys

    action, name = arguments.action, arguments.name
    if (action == "list") != (name is None):
        raise ConfigurationError(
            f"{action} takes no name" if name else f"{action} needs a name: foresay keys {action} NAME"
        )
    if action == "hash":
        print(keys.entry_text(name, _given()), end="")
    elif action == "list":
        _list(_file(arguments))
    else:
        key = keys.new_key()
        print(keys.entry_text(name, key), end="")
        print(f"{name}'s key, which is not shown again: {key}", file=sys.stderr)
    return 0


def _list(path: Path) -> None:
    """Print a line for each key: its name, its id, its own limit."""
    from foresay.server.gateway import keys

    entries = keys.read(path)
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        most = entry.max_requests_per_minute
        limit = "" if most is None else f"max_requests_per_minute {most or 'none'}"
        print(f"{entry.name:<{width}}  {entry.id}  {limit}".rstrip())
    print(f"{len(entries) or 'no'} key{'' if len(entries) == 1 else 's'} in {path}", file=sys.stderr)


def _file(arguments: Namespace) -> Path:
    """The named file, else the one in the settings."""
    named = arguments.api_key_file or load(ServeConfig, {}, os.environ, arguments.config).config.api_key_file
    if named is None:
        raise ConfigurationError("list needs a file of keys: --api-key-file FILE")
    return Path(named)


def _given() -> str:
    """Read the key from stdin; without echo on a terminal."""
    return getpass("key: ", stream=sys.stderr) if sys.stdin.isatty() else sys.stdin.readline().strip()
