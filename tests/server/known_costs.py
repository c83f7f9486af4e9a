"""What steps and drafts cost the engines of tests: given, as an engine hands them to the next one, and never measured.

How busy the machine was while an engine started would otherwise decide what is drafted in it, for as long as it lives.
``python -m tests.server.known_costs serve ...`` is ``foresay serve ...`` whose engines are given them, and learn
nothing from how long their steps take (``steady/sitecustomize.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from foresay.server.cli.main import main
from foresay.server.engine.costs import Costs
from foresay.server.engine_process import client
from foresay.server.engine_process.child import Spawned
from foresay.server.engine_process.client import EngineProcess
from foresay.server.engine_process.frames import Channel
from foresay.server.settings.config import ServeConfig
from foresay.spec.budget.cost import DraftCost
from foresay.spec.names import DRAFTERS

if TYPE_CHECKING:
    import pytest

#: Seconds by rows: about what an Intel Cascade Lake took for the bundled target.
STEPS = [(1, 1.7e-3), (6, 1.75e-3), (8, 2.4e-3), (16, 3.6e-3), (32, 6e-3), (64, 12e-3)]
#: So many times as much, in an engine that is not to compute what it can read from disk.
TIMES = float(os.environ.get("KNOWN_COSTS_TIMES", "1"))
#: A third of what the bundled draft model took, so that drafting pays.
DRAFT = DraftCost(start=1e-4, level=6e-5, token=6e-6)


def known() -> Costs:
    """The costs of an engine of any settings."""
    steps = [(rows, TIMES * seconds) for rows, seconds in STEPS]
    return Costs(steps=steps, drafts=dict.fromkeys(DRAFTERS, DRAFT), root=STEPS[0][1])


def give(patch: pytest.MonkeyPatch) -> None:
    """Engines in this process, and those of clients in it, are given them. They leave neither packed weights nor KV in
    the user's cache, nor do those of servers started from here, unless they are set to."""
    patch.setenv("FORESAY_WEIGHT_CACHE", "false")
    patch.setenv("FORESAY_KV_DISK", "off")
    patch.setattr("foresay.verifier.model.weight_cache.LEAST_BYTES", sys.maxsize)
    patch.setattr(client, "Costs", known)
    patch.setattr("foresay.server.engine.build.Costs", known)
    patch.setattr("foresay.server.engine_process.local.Costs", known)
    patch.setattr(EngineProcess, "__init__", _forgetful(EngineProcess.__init__))


def _forgetful(begin: Callable[..., None]) -> Callable[..., None]:
    def begun(process: EngineProcess, spawned: Spawned, config: ServeConfig, receive: Callable[..., None]) -> None:
        changed = msgspec.structs.replace(config, kv_disk=config.kv_disk or "off", weight_cache=False)
        begin(process, spawned, changed, receive)

    return begun


async def _knowing(process: EngineProcess, reserved: dict[str, int], steps: int, _: Costs) -> Channel:
    return await _open(process, reserved, steps, known())


_open = EngineProcess.open
if __name__ == "__main__":
    os.environ["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent / 'steady'}"
    # Those of changed settings would measure again.
    EngineProcess.open = _knowing  # type: ignore[method-assign, assignment]
    sys.exit(main())
