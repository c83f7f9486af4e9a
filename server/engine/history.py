"""The file in which the suffix drafter keeps earlier answers across restarts (``--draft-history``).

::

    foresay draft history 1       what it is, a line
    16 bytes                      BLAKE2b hash of the rest
    MessagePack                   Stored: texts by salt, salts as hashes under a key that is the file's own

It holds token ids: of answers, and of the last 16 prompt tokens before each. So only its owner may read it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foresay.drafters.combined import members_of
from foresay.drafters.suffix.contexts import END, History, Texts
from foresay.kvpaging import shared_files
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import EngineCore
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import SUFFIX
from foresay.spec.observer import Observer
from foresay.spec.sequence import SequenceState

MAGIC, DIGEST_BYTES = b"foresay draft history 1\n", 16
#: Seconds between two writes while the engine runs.
EVERY = 300.0
#: Tokens that the writing thread packs at once, and how long it sleeps afterwards.
_PIECE, _REST = 4096, 0.001
log = logging.getLogger("foresay.engine")


class Stored(msgspec.Struct):
    """What the file holds. texts: by the hash of their salt, least recently used first: each with its texts, the oldest
    first, as little-endian int32."""

    vocab_size: int
    key: bytes
    texts: list[tuple[bytes, list[bytes]]]


def read(path: str, vocab_size: int) -> History:
    """The history in a file; an empty one if there is no file yet.

    Raises ConfigurationError for a path that cannot be read or written, and a damaged file or one of another kind.
    """
    file = Path(path).expanduser()
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--draft-history {path}: no file can be written in {file.parent}")
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise ConfigurationError(f"--draft-history {path}: cannot be read ({error.strerror})") from None
    if not data.startswith(MAGIC):
        raise ConfigurationError(f"--draft-history {path}: is not a draft history; name another file")
    head = len(MAGIC) + DIGEST_BYTES
    try:
        if _digest(data[head:]) != data[len(MAGIC) : head]:
            raise ValueError("the checksum differs")
        stored = msgspec.msgpack.decode(data[head:], type=Stored)
        texts = [(salt, [_unpacked(text, stored.vocab_size) for text in kept]) for salt, kept in stored.texts]
    except ValueError as why:  # msgspec's are
        raise ConfigurationError(f"--draft-history {path}: is damaged ({why}); move it away to start afresh") from None
    if stored.vocab_size != vocab_size:
        raise ConfigurationError(
            f"--draft-history {path}: was written with a target of {stored.vocab_size} tokens, this one has "
            f"{vocab_size}; name another file for it"
        )
    history = History(key=stored.key)
    for salt, kept in texts:
        history.restore(salt, kept)
    return history


def write(path: str, texts: Texts, key: bytes, vocab_size: int, rest: float = 0) -> bool:
    """Write :meth:`History.texts`; False if another process does. rest: seconds between pieces. Raises OSError."""
    packed = [(salt, [_packed(text, rest) for text in kept]) for salt, kept in texts]
    body = msgspec.msgpack.encode(Stored(vocab_size, key, packed))
    whole = MAGIC + _digest(body) + body
    return shared_files.write(Path(path).expanduser(), lambda file: file.write(whole), sync=True)


def _packed(tokens: list[int], rest: float) -> bytes:
    """Pack a text at its current length; it may grow meanwhile."""
    packed = bytearray()
    for begin in range(0, end := len(tokens), _PIECE):
        packed += np.array(tokens[begin : min(begin + _PIECE, end)], "<i4").tobytes()
        time.sleep(rest)
    return bytes(packed)


def _unpacked(text: bytes, vocab_size: int) -> list[int]:
    tokens = np.frombuffer(text, "<i4")
    if not ((tokens >= 0) & ((tokens < vocab_size) | (tokens == END))).all():
        raise ValueError(f"it holds tokens outside the vocabulary of {vocab_size}")
    unpacked: list[int] = tokens.tolist()
    return unpacked


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


class HistoryWriter(Observer):
    """Writes the history of an engine's drafter now and then, in a thread, and at the end."""

    def __init__(self, path: str, engine: EngineCore) -> None:
        suffix: Any = members_of(engine.drafter)[SUFFIX]
        self._path, self._every, self._said = path, EVERY, ""
        self._history: History = suffix.history
        self._history.stored = True
        self._vocab_size, self._written = engine.info.vocab_size, self._history.changes
        self._at = time.monotonic()
        self._thread: threading.Thread | None = None
        engine.observe(self)

    @classmethod
    def of(cls, config: EngineConfig, engine: EngineCore) -> HistoryWriter | None:
        """That of the engine's settings; None if they name no file."""
        return None if config.draft_history is None else cls(config.draft_history, engine)

    def ended(self, sequence: SequenceState) -> None:
        """Answers are added when sequences end: write, if the last write was long ago."""
        history = self._history
        due = time.monotonic() - self._at >= self._every and (self._thread is None or not self._thread.is_alive())
        if due and history.changes != self._written:
            self._at = time.monotonic()
            # The texts only grow, so the thread may read them.
            given = (history.changes, history.texts(), history.key, _REST)
            self._thread = threading.Thread(target=self._write, args=given, name="draft history", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write any changes."""
        if self._thread is not None:
            self._thread.join()
        if self._history.changes != self._written:
            self._write(self._history.changes, self._history.texts(), self._history.key)

    def _write(self, changes: int, texts: Texts, key: bytes, rest: float = 0.0) -> None:
        """Write the texts after so many changes, or say once why not."""
        try:
            why = "" if write(self._path, texts, key, self._vocab_size, rest) else "another process is writing it"
        except OSError as error:
            why = error.strerror or str(error)
        if not why:
            self._written = changes
        elif why != self._said:
            log.warning("--draft-history %s: cannot be written (%s)", self._path, why)
        self._said = why
