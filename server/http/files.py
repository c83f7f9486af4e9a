"""Open files: as many as the system lets this process have, and a plain word where that was not enough."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
#: Seconds between two lines about connections that cannot be accepted; asyncio tries again every second.
QUIET_SECONDS = 30.0
log = logging.getLogger("foresay.server")


def allow_most() -> None:
    """Raise the soft limit of open files to the hard one: every connection is one, and shells begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it; then it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Refusals:
    """An event loop's exception handler that tells once in a while, in one line, that no file is left for a client."""

    def __init__(self) -> None:
        self._told = -QUIET_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what :meth:`loop.call_exception_handler` was given."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_FILES and "socket" in context):
            loop.default_exception_handler(context)
        elif loop.time() - self._told >= QUIET_SECONDS:
            self._told = loop.time()
            log.error("%s", _reason(error))


def _reason(error: OSError) -> str:
    if error.errno == errno.ENFILE:
        return "clients wait: the system has no open files left (fs.file-max)"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"clients wait: this process has all the {limit} open files it may have; raise the hard limit "
        "(ulimit -Hn, LimitNOFILE= of a service), or let fewer connect"
    )
