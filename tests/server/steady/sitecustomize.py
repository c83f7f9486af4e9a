"""Runs first in the engine processes of live tests: costs stay as they were given, however long a step takes."""

from __future__ import annotations

import sys

if "foresay.server.engine_process.process" in sys.orig_argv:
    from foresay.spec.budget import cost

    cost.Pace.learn = lambda pace, amounts, seconds: None  # type: ignore[assignment, method-assign]
