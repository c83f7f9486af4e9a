"""``foresay keys``: make API keys, take them back, or hash one that you bring."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from getpass import getpass
from pathlib import Path

from server.commands.command import Command
from server.config import ServeConfig
from server.load_config import load
from spec.errors import ConfigurationError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("add", "remove", "hash"),
        help="add: make a key, show it once and add its hash to the file; remove: take a key back; hash: read a key "
        "from stdin and print what to put into the file",
    )
    parser.add_argument("name", metavar="NAME", help="whose key it is: 1 to 64 letters, digits, '.', '@', '-' and '_'")
    parser.add_argument("--api-key-file", metavar="FILE", help="the file of keys (default: the one in the settings)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with settings (default: FORESAY_CONFIG)")


def run(config: None, arguments: Namespace) -> int:
    """Make, take back or hash one key. The key itself is written nowhere but to the terminal."""
    from server.gateway import key_file, keys

    if arguments.action == "hash":
        print(key_file.entry_text(arguments.name, _given()), end="")
        return 0
    path, key = _file(arguments), keys.new_key()
    if arguments.action == "remove":
        key_file.remove(path, arguments.name)
        print(f"{arguments.name}'s key is no longer in {path}; a running server sees it by itself.", file=sys.stderr)
        return 0
    key_file.append(path, arguments.name, key)
    print(key)
    print(f"{arguments.name}'s key is above and is not shown again; its hash is in {path}.", file=sys.stderr)
    print(f"Use it: foresay serve --api-key-file {path}   (a running server reads it by itself)", file=sys.stderr)
    return 0


def _file(arguments: Namespace) -> Path:
    named = arguments.api_key_file or load(ServeConfig, {}, os.environ, arguments.config).config.api_key_file
    if named is None:
        raise ConfigurationError("name the file of keys with --api-key-file or FORESAY_API_KEY_FILE")
    return Path(named)


def _given() -> str:
    """The key on stdin; typed unseen on a terminal."""
    return getpass("key: ", stream=sys.stderr) if sys.stdin.isatty() else sys.stdin.readline().strip()


COMMAND = Command(
    "keys",
    "make API keys for the server, and take them back",
    ("foresay keys add alice --api-key-file keys.toml", "foresay keys remove alice", "foresay keys hash alice"),
    None,
    run,
    _add_arguments,
)
