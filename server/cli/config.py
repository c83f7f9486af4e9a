"""``foresay config show``: the settings in force, as a TOML file that would reproduce them."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from foresay.server.cli.command import command
from foresay.server.settings.config import SECTIONS, ServeConfig
from foresay.server.settings.fields import Setting, settings_of
from foresay.server.settings.load import load


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", default="show", metavar="ACTION", choices=("show",), help="show: print them (default)"
    )
    parser.add_argument("--origin", action="store_true", help="show where each value comes from")
    parser.add_argument("--config", metavar="FILE", help="a TOML file to read (default: FORESAY_CONFIG)")


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


@command(None, _add_arguments, name="config")
def run(config: None, arguments: Namespace) -> int:
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
