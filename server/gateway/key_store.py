"""The current keys and their callers: keys from the settings and the key file, which is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from foresay.server.gateway.caller import Caller, CallerUsage, Limits, RateLimiter
from foresay.server.gateway.keys import ApiKey, HashedKey, KeyRing, exposed, read
from foresay.spec.errors import ConfigurationError

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
        self._ring = KeyRing()
        self._callers: dict[str, Caller] = {}
        self.needed = bool(keys) or file is not None
        self.anyone = Caller(rate_limiter=RateLimiter(self._limits))
        self._read()
        if self.needed and not self._ring.keys:
            raise ConfigurationError(f"the key file {file} holds no key; foresay keys new NAME prints one")

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [key.name for key in self._ring.keys]

    @property
    def callers(self) -> list[Caller]:
        """The callers with keys, or a single one for everybody if no key is needed."""
        return list(self._callers.values()) if self.needed else [self.anyone]

    def caller(self, presented: str) -> Caller | None:
        """The caller with this key; None if it is not valid."""
        key = self._ring.find(presented)
        return None if key is None else self._callers[key.id]

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
            if entries is None and self._ring.keys:
                raise ConfigurationError(f"the key file {self._file} is empty (to revoke all keys, write key = [])")
            keys += [entry.as_key(self._limits) for entry in entries or ()]
            if exposed(self._file):
                log.warning("others on this machine can read the key file %s: chmod 600 it", self._file)
        self._replace(KeyRing(keys))

    def _replace(self, ring: KeyRing) -> None:
        """Use the keys of ``ring``. Keys that were removed, or changed under the same id, are revoked where in use."""
        before = {key.id: key for key in self._ring.keys}
        callers = {}
        for key in ring.keys:
            known = before.get(key.id)
            kept = known is not None and known.hashed == key.hashed
            rate_limiter = self._callers[key.id].rate_limiter if kept else RateLimiter(key.limits)
            usage = self._callers[key.id].usage if kept else CallerUsage()
            if rate_limiter.limits != key.limits:
                rate_limiter.change(key.limits)
            callers[key.id] = Caller(key.name, key.id, rate_limiter, usage)
        for id, caller in self._callers.items():
            caller.rate_limiter.revoked = id not in callers or callers[id].rate_limiter is not caller.rate_limiter
        for caller in callers.values():
            caller.rate_limiter.alone = len(callers) == 1
        self._ring, self._callers = ring, callers


def _stamp(file: Path) -> Stamp | None:
    """A value that changes when the file does; None if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
