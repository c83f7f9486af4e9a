"""Where ``foresay`` and ``python -m foresay.server.cli`` begin. Importing the commands takes a while, in which Ctrl-C
ends the process without a traceback."""

from __future__ import annotations

import os
import signal
import sys

from foresay.server.cli import INTERRUPTED


def _leave(*interrupt: object) -> None:
    os._exit(INTERRUPTED)  # there is nothing to clean up yet


def main() -> int:
    """Run the command that ``sys.argv`` has, and return its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _leave)
    from foresay.verifier.ops.kernels.cpu import kernel_cache

    kernel_cache.run_unpatched()
    from foresay.server.cli.main import main as run

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
