"""API keys: how they are made, how they are kept and how one is recognised.

A key is 256 random bits, and kept as one salted BLAKE2b hash. Slow hashes (scrypt, argon2) make each guess dear, for
secrets that people think up and others can guess; nobody guesses one of 2**256, and a slow hash on every request would
be added to every time to first token. So keys that somebody brings must not be short either. The salt keeps equal keys
in two files from being seen to be equal.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

import msgspec

from server.gateway.rate_limiter import Limits
from spec.errors import ConfigurationError

PREFIX = "sk-foresay-"
SALT_BYTES, DIGEST_BYTES = 16, 32
USABLE = re.compile(r"[\x21-\x7e]{16,512}")
HASHED = re.compile(r"blake2b\$([0-9a-f]{32})\$([0-9a-f]{64})")


class HashedKey(msgspec.Struct, frozen=True):
    """A key that cannot be told from what is kept of it."""

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, key: str) -> HashedKey:
        """Hash a key with a new salt."""
        salt = secrets.token_bytes(SALT_BYTES)
        return cls(salt, _digest(key, salt))

    @classmethod
    def parse(cls, text: str) -> HashedKey:
        """What :meth:`__str__` wrote; ValueError for anything else."""
        found = HASHED.fullmatch(text)
        if found is None:
            raise ValueError("not a hash that foresay keys made")
        return cls(bytes.fromhex(found[1]), bytes.fromhex(found[2]))

    def __str__(self) -> str:
        """``blake2b$SALT$DIGEST``, both as hexadecimal digits."""
        return f"blake2b${self.salt.hex()}${self.digest.hex()}"

    def matches(self, presented: str) -> bool:
        """Whether this is the hash of ``presented``; takes as long whatever it is."""
        return hmac.compare_digest(_digest(presented, self.salt), self.digest)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key that opens the server. id: never changes, so it stands for the key where things are kept apart."""

    id: str
    name: str
    hashed: HashedKey
    limits: Limits


class KeyRing:
    """Every key that opens the server."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented. All are compared, so the time tells neither which it was nor how nearly."""
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
            "foresay keys add NAME makes one"
        )


def _digest(key: str, salt: bytes) -> bytes:
    given = key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(given, digest_size=DIGEST_BYTES, salt=salt, person=b"foresay api key").digest()
