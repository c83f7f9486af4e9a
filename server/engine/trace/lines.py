"""A file that lines are appended to, and whose failure stops nothing else.

They are handed to the system about once a second, which copies them: on a local disk that takes microseconds.
A file system that makes writers wait (over a network, say) makes the next step wait too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

from spec.errors import ConfigurationError

#: Lines wait in memory for at most so long, or until there are so many bytes of them.
FLUSH_SECONDS = 1.0
BUFFER_BYTES = 1 << 16
log = logging.getLogger("foresay.engine")


def opened(path: str) -> BinaryIO:
    """The file to append to; a new one is for its owner's eyes only. Raises ConfigurationError if that cannot be."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(Path(path).expanduser(), flags, 0o600)
    except OSError as error:
        raise ConfigurationError(f"--trace {path}: cannot be written ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # whoever reads a pipe slowly would hold up the engine
        raise ConfigurationError(f"--trace {path}: is not a file that can be appended to")
    file = os.fdopen(descriptor, "ab", buffering=BUFFER_BYTES)
    if _ends_in_half_a_line(path):
        file.write(b"\n")
    return file


def _ends_in_half_a_line(path: str) -> bool:
    """Whether whoever wrote last was killed, or found the disk full."""
    with Path(path).expanduser().open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Lines:
    """Appends lines. One that cannot be written is the last: the log says so."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = opened(path)
        self._flushed = time.monotonic()

    def append(self, line: bytes) -> None:
        """Write a line; it reaches the file within a second if others follow, else with the next :meth:`flush`."""
        if self._file is None:
            return
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            self._give_up(error)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand to the system what was written."""
        self._flushed = time.monotonic()
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write no more."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace ends here: %s cannot be written any more (%s)", self._path, error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it tries once more to write the rest
                file.close()
