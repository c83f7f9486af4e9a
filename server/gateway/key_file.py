"""The file of API keys: names, hashes and limits, never a key.

::

    [[key]]
    id = "5f0c81d2ab37"
    name = "alice"
    hash = "blake2b$...$..."
    max_requests_per_minute = 60      # what is not said is as the server's flags say; 0 is no limit
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from server.gateway.allowance import Limits
from server.gateway.keys import HASHED, ApiKey, HashedKey, check_usable, new_id
from spec.errors import ConfigurationError

HEADER = (
    "# API keys of Foresay. Only hashes are kept; foresay keys add NAME appends one. Take a key back by deleting it.\n"
)

NotNegative = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=r"^[\w.@-]{1,64}$")]


class Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One ``[[key]]``."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}$")]
    name: Name
    hash: Annotated[str, Meta(pattern=f"^{HASHED.pattern}$")]
    max_requests_per_minute: NotNegative | None = None
    max_tokens_per_minute: NotNegative | None = None
    max_concurrent_requests: NotNegative | None = None

    def as_key(self, defaults: Limits) -> ApiKey:
        """The key, with ``defaults`` for the limits that are not its own."""
        names = Limits.__struct_fields__
        own = {name: getattr(defaults if getattr(self, name) is None else self, name) or None for name in names}
        return ApiKey(id=self.id, name=self.name, hashed=HashedKey.parse(self.hash), limits=Limits(**own))


class Entries(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    key: list[Entry] = []


def read(path: Path) -> list[Entry]:
    """The keys in the file; :class:`ConfigurationError` says what is wrong with it, without repeating a value."""
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Entries).key
    except OSError as error:
        raise ConfigurationError(f"cannot read the key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"cannot read the key file {path}: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the key file {path} is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the key file {path} is wrong: {error}") from None
    for field in ("id", "name"):
        values = [getattr(entry, field) for entry in entries]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"the key file {path} has the {field} {twice!r} twice")
    return entries


def entry_text(name: str, key: str) -> str:
    """The ``[[key]]`` that stands for ``key``."""
    check_usable(key)
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigurationError("a name is 1 to 64 letters, digits, '.', '@', '-' and '_'") from None
    return f'[[key]]\nid = "{new_id()}"\nname = "{name}"\nhash = "{HashedKey.of(key)}"\n'


def append(path: Path, name: str, key: str) -> None:
    """Add a key to the file, which is made, for its owner's eyes only, if there is none."""
    existing = read(path) if path.exists() else []
    if any(entry.name == name for entry in existing):
        raise ConfigurationError(f"{path} has a key named {name!r} already")
    text = entry_text(name, key)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(("\n" if existing else HEADER + "\n") + text)
    except OSError as error:
        raise ConfigurationError(f"cannot write the key file {path}: {error.strerror}") from None


def exposed(path: Path) -> bool:
    """Whether others than the owner can read or write the file."""
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False
