"""The coding agents that ``foresay launch`` starts, and what each needs to use a server. Does not import torch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import msgspec

_FILE = Path(__file__).parent / "agents.toml"

#: Values to fill in, by name.
Values = Mapping[str, str | int]


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent; the fields are explained in agents.toml."""

    title: str
    command: tuple[str, ...]
    install: str
    tokens: int
    tools: bool = True
    environment: dict[str, str] = {}
    config: dict[str, Any] = {}
    file: str = ""
    cannot: str = ""

    def started(self, values: Values, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command and the environment variables that make it use a server. Its config file is written to
        ``folder``.

        values: url, key, model, context and output.
        """
        config = json.dumps(_filled(self.config, values))
        place = folder / (self.file or "unused")
        if self.file:
            place.write_text(config, "utf-8")
        known = {**values, "quoted_model": json.dumps(values["model"]), "config": config, "config_file": str(place)}
        command = [str(_filled(word, known)) for word in self.command]
        return command, {name: str(_filled(value, known)) for name, value in self.environment.items()}


def _filled(value: Any, values: Values) -> Any:
    """A value of the file with its $names filled in, recursively."""
    if isinstance(value, str):
        alone = values.get(value[1:]) if value.startswith("$") else None
        return Template(value).substitute(values) if alone is None else alone
    if isinstance(value, dict):
        return {_filled(key, values): _filled(one, values) for key, one in value.items()}
    return [_filled(one, values) for one in value] if isinstance(value, list) else value


class _AgentsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    serve: dict[str, tuple[str, ...]]
    agents: dict[str, Agent]


@cache
def _file() -> _AgentsFile:
    return msgspec.convert(tomllib.loads(_FILE.read_text("utf-8")), _AgentsFile)


def known_agents() -> dict[str, Agent]:
    """All agents by the name that ``foresay launch`` takes, in the file's order."""
    return _file().agents


def models_for_agents(device: str) -> tuple[str, ...]:
    """Targets of the catalog that agents can work with, the best first. device: ``gpu`` or ``cpu``."""
    return _file().serve[device]
