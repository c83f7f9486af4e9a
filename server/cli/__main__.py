"""Where ``foresay`` and ``python -m foresay.server.cli`` begin."""

from __future__ import annotations

import sys

from foresay.server.cli import begin, ready


def main() -> int:
    """Run the command that ``sys.argv`` has, and return its exit status."""
    begin()
    from foresay.verifier.ops.kernels.cpu import kernel_cache

    kernel_cache.run_unpatched()
    from foresay.server.cli.main import main as run

    ready()
    return run()


if __name__ == "__main__":
    sys.exit(main())
