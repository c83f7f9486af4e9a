"""API keys: how they are made, kept in a file, and recognised.

A key is 256 random bits, and kept as one salted BLAKE2b hash. Slow hashes (scrypt, argon2) make each guess expensive,
for secrets that people choose and others can guess; nobody guesses one of 2**256, and a slow hash on every request
would add to every time to first token. So keys that users bring must not be short either. The salt hides that two files
have equal keys.

::

    [[key]]
    id = "5f0c81d2ab37"
    name = "alice"
    hash = "blake2b$...$..."
    max_requests_per_minute = 60      # defaults to the server's flags; 0 is no limit

A file without keys must say ``key = []``: an empty file may be what an editor, or a full disk, left behind.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from foresay.server.gateway.caller import Limits
from foresay.spec.errors import ConfigurationError

PREFIX = "sk-foresay-"
SALT_BYTES, DIGEST_BYTES = 16, 32
USABLE = re.compile(r"[\x21-\x7e]{16,512}")
HASHED = re.compile(r"blake2b\$([0-9a-f]{32})\$([0-9a-f]{64})")


class HashedKey(msgspec.Struct, frozen=True):
    """A salted hash, from which the key cannot be recovered."""

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, key: str) -> HashedKey:
        """Hash a key with a new salt."""
        salt = secrets.token_bytes(SALT_BYTES)
        return cls(salt, _digest(key, salt))

    @classmethod
    def parse(cls, text: str) -> HashedKey:
        """Parse what :meth:`__str__` wrote; raises ValueError for anything else."""
        found = HASHED.fullmatch(text)
        if found is None:
            raise ValueError("not a hash that foresay keys made")
        return cls(bytes.fromhex(found[1]), bytes.fromhex(found[2]))

    def __str__(self) -> str:
        """``blake2b$SALT$DIGEST``, both as hexadecimal digits."""
        return f"blake2b${self.salt.hex()}${self.digest.hex()}"

    def matches(self, presented: str) -> bool:
        """Whether this is the hash of ``presented``; in constant time."""
        return hmac.compare_digest(_digest(presented, self.salt), self.digest)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One valid key of the server. id: never changes, so it identifies the tenant."""

    id: str
    name: str
    hashed: HashedKey
    limits: Limits


class KeyRing:
    """All valid keys of the server."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented; None if it is not valid. All are compared, so the time reveals nothing."""
        found: ApiKey | None = None
        for key in self.keys:
            if key.hashed.matches(presented):
                found = key
        return found


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def new_id() -> str:
    """An id for a key, unrelated to it."""
    return secrets.token_hex(6)


def check_usable(key: str) -> None:
    """Raise :class:`ConfigurationError` for a key that could be guessed or does not fit into a header."""
    if not USABLE.fullmatch(key):
        raise ConfigurationError(
            "a key must be 16 to 512 printable characters without a space, and should be random: "
            "foresay keys new NAME makes one"
        )


def _digest(key: str, salt: bytes) -> bytes:
    given = key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(given, digest_size=DIGEST_BYTES, salt=salt, person=b"foresay api key").digest()


NotNegative = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=r"^[\w.@-]{1,64}$")]


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One ``[[key]]``."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}$")]
    name: Name
    hash: Annotated[str, Meta(pattern=f"^{HASHED.pattern}$")]
    max_requests_per_minute: NotNegative | None = None
    max_tokens_per_minute: NotNegative | None = None
    max_concurrent_requests: NotNegative | None = None

    def as_key(self, defaults: Limits) -> ApiKey:
        """The key, with ``defaults`` for the limits that it does not set."""
        names = Limits.__struct_fields__
        own = {name: getattr(defaults if getattr(self, name) is None else self, name) or None for name in names}
        return ApiKey(id=self.id, name=self.name, hashed=HashedKey.parse(self.hash), limits=Limits(**own))


class Entries(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    key: list[KeyEntry] | None = None


def read(path: Path) -> list[KeyEntry] | None:
    """The keys in the file; None if it has no ``key`` at all.

    Raises :class:`ConfigurationError` saying what is wrong with it, without quoting a value.
    """
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
        values = [getattr(entry, field) for entry in entries or ()]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"the key file {path} has the {field} {twice!r} twice")
    return entries


def entry_text(name: str, key: str) -> str:
    """The ``[[key]]`` entry for ``key``."""
    check_usable(key)
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigurationError("a name is 1 to 64 letters, digits, '.', '@', '-' and '_'") from None
    return f'[[key]]\nid = "{new_id()}"\nname = "{name}"\nhash = "{HashedKey.of(key)}"\n'


def exposed(path: Path) -> bool:
    """Whether others than the owner can read or write the file."""
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False
