"""The engine process: reads frames between steps, steps, sends what the step emitted.

Started by :mod:`foresay.server.engine_process.child` as
``python -P -m foresay.server.engine_process.process SERVER FD``: the server's process id, and a descriptor. It imports
the engine's modules before the first frame says which engine to build. It ends on a Stop frame, when the server dies,
when the other end of its socket closes, or when a step raises (the server then starts a new one).
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys

from foresay.server.engine_process.child import ENGINE, PR_SET_NAME, die_with, prctl, uncollected
from foresay.server.engine_process.frames import GONE, Link


def _import() -> None:
    """Import the engine's modules."""
    with uncollected():
        from foresay.verifier.ops.kernels.cpu import kernel_cache

        kernel_cache.run_unpatched()  # before modules are read: an upgrade may replace the files later
        import foresay.server.engine_process.loop  # noqa: F401

    gc.freeze()


def main(server: int, descriptor: int) -> int:
    """Run until the server stops it; returns the exit status, 0 for an orderly end."""
    if not die_with(server):
        return 0
    # A service manager's SIGTERM reaches every process; the server drains first and then ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _import()
    prctl(PR_SET_NAME, ENGINE)
    from foresay.server.engine_process.loop import serve

    with socket.socket(fileno=descriptor) as connection, contextlib.closing(Link(connection)) as link:
        try:
            return serve(link)
        except GONE:
            return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
