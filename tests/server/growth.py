"""What an engine of the target in a directory grows by, in MiB: ``python -m tests.server.growth DIR``.

First prompts of some lengths, for whatever is made once, then prompts of all lengths between.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams

FIRST, LAST, STEP = 80, 240, 8


def resident() -> float:
    """MiB in use, without what was freed but not given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0]) / 1024


def run(engine: EngineCore, length: int) -> None:
    """One prompt of so many tokens, and two tokens behind it."""
    prompt = [5 + (length + place) % 100 for place in range(length)]
    engine.add(Request(id=str(length), prompt=prompt, params=SamplingParams(max_tokens=2, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    engine.notify()


def main(target: str) -> None:
    config = EngineConfig(target=target, draft="none", dtype="float32", kv_tokens=1024, prefix_cache=False, threads=1)
    engine = build_engine(config)
    for length in range(FIRST, LAST + STEP, STEP):
        run(engine, length)
    before = resident()
    for length in range(FIRST, LAST):
        run(engine, length)
    print(f"{resident() - before:.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
