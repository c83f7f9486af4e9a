"""API keys: how they are made, kept in a file, which is read at the start, and recognised; and the caller of the
request that the current task serves, with how many requests it may send.

A key is 256 random bits, and kept as one salted BLAKE2b hash. Slow hashes (scrypt, argon2) make each guess expensive,
for secrets that people choose and others can guess; nobody guesses one of 2**256, and a slow hash on every request
would add to every time to first token. So keys that users bring (``--api-key``) must not be short either. The salt
hides that two files have equal keys.

::

    [[key]]
    id = "5f0c81d2ab37"
    name = "alice"
    hash = "blake2b$...$..."
    max_requests_per_minute = 60      # defaults to the server's flag; 0 is no limit
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import secrets
import time
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from foresay.server.schemas.bounds import ID
from foresay.server.schemas.errors import RateLimited, complaint
from foresay.spec.errors import ConfigurationError, spelled

PREFIX = "sk-foresay-"
SALT_BYTES, DIGEST_BYTES = 16, 32
HASHED = re.compile(r"blake2b\$([0-9a-f]{32})\$([0-9a-f]{64})")


def hashed(key: str, salt: bytes = b"") -> str:
    """``blake2b$SALT$DIGEST`` in hexadecimal digits, from which the key cannot be recovered; by default with a new
    salt."""
    given, salt = key.encode("utf-8", "surrogateescape"), salt or secrets.token_bytes(SALT_BYTES)
    digest = hashlib.blake2b(given, digest_size=DIGEST_BYTES, salt=salt, person=b"foresay api key")
    return f"blake2b${salt.hex()}${digest.hexdigest()}"


def matches(known: str, presented: str) -> bool:
    """Whether ``known`` is the hash of ``presented``; in constant time."""
    _, salt, _ = known.split("$")
    return hmac.compare_digest(hashed(presented, bytes.fromhex(salt)), known)


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


#: For messages.
EXAMPLE = (
    'an entry is [[key]], id = "5f0c81d2ab37", name = "alice" and hash = "blake2b$..." (as foresay keys new printed '
    "it, not the key itself), each on a line of its own"
)
Name = Annotated[str, Meta(pattern=r"^[\w.@-]{1,64}\Z")]


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One ``[[key]]``."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]
    name: Name
    hash: Annotated[str, Meta(pattern=rf"^{HASHED.pattern}\Z")]
    max_requests_per_minute: Annotated[int, Meta(ge=0)] | None = None


class Entries(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    key: list[KeyEntry] = []


def read(path: Path) -> list[KeyEntry]:
    """The keys in the file. Raises :class:`ConfigurationError` saying what is wrong with it, without quoting a
    value."""
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Entries).key
    except OSError as error:
        raise ConfigurationError(f"cannot read the key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"cannot read the key file {path}: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the key file {path} is not valid TOML: {error}; {EXAMPLE}") from None
    except msgspec.ValidationError as error:
        message, where = complaint(error)
        at = f"{spelled(where)}: " if where else ""
        raise ConfigurationError(f"the key file {path}: {at}{message}; {EXAMPLE}") from None
    for field in ("id", "name"):
        values = [getattr(entry, field) for entry in entries]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"the key file {path} has the {field} {twice!r} twice")
    return entries


def entry_text(name: str, key: str) -> str:
    """The ``[[key]]`` entry for ``key``."""
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigurationError("a name is 1 to 64 letters, digits, '.', '@', '-' and '_'") from None
    return f'[[key]]\nid = "{secrets.token_hex(6)}"\nname = "{name}"\nhash = "{hashed(key)}"\n'


log = logging.getLogger("foresay.server")


class KeyStore:
    """The callers by their keys. Without a key in the settings and without a key file none is needed.

    per_minute: the limit of keys without one of their own, and of all callers together if no key is needed.
    """

    def __init__(self, keys: Sequence[str] = (), file: str | None = None, per_minute: int | None = None) -> None:
        entries = [] if file is None else read(Path(file))
        self.needed = bool(keys) or file is not None
        if self.needed and not keys and not entries:
            raise ConfigurationError(f"the key file {file} holds no key; foresay keys new NAME prints one")
        if file is not None and Path(file).stat().st_mode & 0o077:
            log.warning("others on this machine can read the key file %s: chmod 600 it", file)
        alone = len(keys) + len(entries) == 1
        self.anyone = Caller(rate_limiter=RateLimiter(per_minute))
        self._callers = [
            (hashed(key), Caller(f"key-{number}", f"flag.{number}", alone, RateLimiter(per_minute)))
            for number, key in enumerate(keys, start=1)
        ]
        for entry in entries:
            own = entry.max_requests_per_minute
            limiter = RateLimiter(per_minute if own is None else own or None)
            self._callers.append((entry.hash, Caller(entry.name, entry.id, alone, limiter)))

    def caller(self, presented: str) -> Caller | None:
        """The caller with this key; None if it is not valid. All keys are compared, so the time reveals nothing."""
        found = [caller for known, caller in self._callers if matches(known, presented)]
        return found[-1] if found else None


# -- the caller of a request -------------------------------------------------------------------------------------------


MINUTE = 60.0


class RateLimiter:
    """Admits ``per_minute`` requests in any 60 seconds; None: all."""

    def __init__(self, per_minute: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._admitted = deque[float](maxlen=per_minute or 0)  # when; the oldest drops out

    def enter(self) -> None:
        """Count a request; raises :class:`RateLimited`, counting nothing, beyond the limit."""
        now = self._clock()
        if len(self._admitted) == self.per_minute and (wait := math.ceil(self._admitted[0] + MINUTE - now)) > 0:
            raise RateLimited(f"At most {self.per_minute} requests per minute are allowed; try again in {wait} s", wait)
        self._admitted.append(now)


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant. alone: there is no other key."""

    name: str = ""
    tenant: str = ""
    alone: bool = True
    rate_limiter: RateLimiter = msgspec.field(default_factory=RateLimiter)


ANYONE = Caller()


@dataclass(slots=True)
class Meter:
    """Tokens of one HTTP request, or of all requests on one WebSocket."""

    prompt_tokens: int = 0
    output_tokens: int = 0

    def wrote(self, tokens: int) -> None:
        """Count further tokens of output."""
        self.output_tokens += tokens


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP request that the current task serves, or the one that opened its WebSocket. id: empty if there is none.
    unknown: fields of its body that the API does not have.
    """

    caller: Caller = ANYONE
    id: str = ""
    meter: Meter = msgspec.field(default_factory=Meter)
    unknown: tuple[str, ...] = ()


NO_REQUEST = RequestContext()
#: Set for each HTTP request; tasks that it starts inherit it.
CONTEXT: ContextVar[RequestContext] = ContextVar("request", default=NO_REQUEST)


def serve(**changes: Any) -> None:
    """Change the current task's request context."""
    CONTEXT.set(msgspec.structs.replace(CONTEXT.get(), **changes))


ID_WANTED = "1 to 128 letters, digits or _ - . : / + = @"


def usable_id(given: str) -> bool:
    """Whether a client's request id can be used."""
    return ID.fullmatch(given) is not None
