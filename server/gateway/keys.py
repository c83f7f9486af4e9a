"""API keys: how they are made, kept in a file, which is read again when it changes, and recognised.

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

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from foresay.server.gateway.caller import Caller, Limits, RateLimiter
from foresay.server.schemas.errors import complaint
from foresay.server.settings.fields import nearest
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


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


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


#: For messages: an entry, and what its fields must be; others are limits.
EXAMPLE = 'an entry is [[key]], id = "5f0c81d2ab37", name = "alice" and hash = "blake2b$...", each on a line of its own'
WANTED = {
    "key": "entries, each below [[key]]",
    "id": "1 to 64 small letters, digits and -",
    "name": "1 to 64 letters, digits, '.', '@', '-' and '_'",
    "hash": "as foresay keys new NAME printed it, not the key itself",
}
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
    text = ""
    try:
        text = path.read_text("utf-8")
        entries = msgspec.convert(tomllib.loads(text), Entries).key
    except OSError as error:
        raise ConfigurationError(f"cannot read the key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"cannot read the key file {path}: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the key file {path} is not valid TOML: {error}; {EXAMPLE}") from None
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the key file {path}:{_wrong(text, *complaint(error))}; {EXAMPLE}") from None
    for field in ("id", "name"):
        values = [getattr(entry, field) for entry in entries or ()]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"the key file {path} has the {field} {twice!r} twice")
    return entries


def _wrong(text: str, message: str, where: tuple[str | int, ...]) -> str:
    """The line of a wrong entry or of its field, and what is wrong there. message, where: msgspec's."""
    named = re.match("Object (missing|contains).*`(.*)`", message)
    field, wrong = named[2] if named else str(where[-1]), "is missing"
    if named is None:
        wrong = f"must be {WANTED.get(field, 'a whole number from 0')}"
    elif named[1] == "contains":
        wrong = f"is unknown{nearest(field, ['key', *KeyEntry.__struct_fields__])}"
    at = next((step + 1 for step in where if isinstance(step, int)), 0)
    parts = re.split(r"(?m)^(?=[ \t]*\[\[)", text)  # each entry, and what is before the first
    own = re.search(rf"(?m)^[ \t]*{re.escape(field)}[ \t]*=", entry := "".join(parts[at:]))
    before = "".join(parts[:at]) + entry[: own.start() if own else 0]
    return f"{before.count(chr(10)) + 1}: {field} {wrong}"


def entry_text(name: str, key: str) -> str:
    """The ``[[key]]`` entry for ``key``."""
    check_usable(key)
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigurationError("a name is 1 to 64 letters, digits, '.', '@', '-' and '_'") from None
    return f'[[key]]\nid = "{secrets.token_hex(6)}"\nname = "{name}"\nhash = "{HashedKey.of(key)}"\n'


def exposed(path: Path) -> bool:
    """Whether others than the owner can read or write the file."""
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False


LOOK_SECONDS = 0.5
log = logging.getLogger("foresay.server")

Stamp = tuple[int, int, int]


class KeyStore:
    """The callers by their keys. Without a key in the settings and without a key file none is needed.

    ``limits`` apply to keys without limits of their own, and to all callers together if no key is needed.
    """

    def __init__(self, keys: Sequence[str] = (), file: str | None = None, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._own = [
            ApiKey(id=f"flag.{number}", name=f"key-{number}", hashed=HashedKey.of(key), limits=self._limits)
            for number, key in enumerate(keys, start=1)
        ]
        self._file = None if file is None else Path(file)
        self._stamp: Stamp | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._callers: dict[str, Caller] = {}
        self.needed = bool(keys) or file is not None
        self.anyone = Caller(rate_limiter=RateLimiter(self._limits))
        self._read()
        if self.needed and not self._keys:
            raise ConfigurationError(f"the key file {file} holds no key; foresay keys new NAME prints one")

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [key.name for key in self._keys]

    def caller(self, presented: str) -> Caller | None:
        """The caller with this key; None if it is not valid. All keys are compared, so the time reveals nothing."""
        found = [key for key in self._keys if key.hashed.matches(presented)]
        return self._callers[found[-1].id] if found else None

    async def watch(self) -> None:
        """Poll the file while the server runs, and read it once it has stopped changing."""
        stamp = self._stamp
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            before, stamp = stamp, _stamp(self._file)
            if stamp == before:
                self.refresh()

    def refresh(self) -> None:
        """Read the file if it has changed. A missing, empty or invalid file only causes a log line."""
        if self._file is None or _stamp(self._file) == self._stamp:
            return
        try:
            self._read()
            log.info("read the key file again: %s", ", ".join(self.names) or "no keys")
        except ConfigurationError as error:
            log.error("%s; the keys read before stay valid", error)

    def _read(self) -> None:
        keys = list(self._own)
        if self._file is not None:
            self._stamp = _stamp(self._file)
            entries = read(self._file)
            if entries is None and self._keys:
                raise ConfigurationError(f"the key file {self._file} is empty (to revoke all keys, write key = [])")
            keys += [entry.as_key(self._limits) for entry in entries or ()]
            if exposed(self._file):
                log.warning("others on this machine can read the key file %s: chmod 600 it", self._file)
        self._replace(tuple(keys))

    def _replace(self, keys: tuple[ApiKey, ...]) -> None:
        """Use these keys. Keys that were removed, or changed under the same id, are revoked where in use."""
        before = {key.id: key for key in self._keys}
        callers = {}
        for key in keys:
            known = before.get(key.id)
            kept = known is not None and known.hashed == key.hashed
            rate_limiter = self._callers[key.id].rate_limiter if kept else RateLimiter(key.limits)
            if rate_limiter.limits != key.limits:
                rate_limiter.change(key.limits)
            callers[key.id] = Caller(key.name, key.id, rate_limiter)
        for id, caller in self._callers.items():
            caller.rate_limiter.revoked = id not in callers or callers[id].rate_limiter is not caller.rate_limiter
        for caller in callers.values():
            caller.rate_limiter.alone = len(callers) == 1
        self._keys, self._callers = keys, callers


def _stamp(file: Path) -> Stamp | None:
    """A value that changes when the file does; None if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
