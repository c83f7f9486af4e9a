"""Pass 0: every kernel at every shape that is used later, compiled and run once, timed apart.

Triton keeps what it has compiled on disk, so this is done by one process for each model, side by side; the measuring
process then only loads. The models have one layer here: more would compile nothing new.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.cases import Cases
from bench.gpu.device import Device
from bench.gpu.models import BUNDLED, paged, random_model, scribble
from bench.gpu.shapes import ModelShape
from bench.gpu.verify import VerifyStep
from foresay.kvpaging import PagePool, PageTable
from foresay.server.engine.device import GPU_CHUNK
from foresay.spec.protocols import Rows
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model.config import ModelConfig

#: In the place of a model's name: the ways of a product that are tried.
SWEEP = "sweep"
ROOT = Path(__file__).resolve().parents[2]
#: Rows of a prompt that are read at once: as the scheduler cuts them, and of a short one.
CHUNK, SHORT = GPU_CHUNK, 128


def compile_model(device: Device, shape: ModelShape, rows: Sequence[int], contexts: Sequence[int]) -> int:
    """Run everything once that the measurements of this shape will launch; how many different calls that were."""
    calls = 0
    cases = Cases(shape.config(ModelConfig.from_directory(BUNDLED / "target")), device.torch, device.dtype)
    for case in cases.all(rows, contexts):
        case.run(*case.make())
        calls += 1
    positions = max(contexts) + 2 * CHUNK
    pool = PagePool(positions // 16 + 8, 16)
    one_layer = replace(shape, sizes=replace(shape.sizes, layers=1))
    model = paged(pool, random_model(device, one_layer, positions), device)
    scribble(model.store)
    for context in contexts:
        for count in rows:
            for temperature in (0.0, 1.0):
                VerifyStep(model, count, context, SamplingParams(temperature=temperature))()
                calls += 1
    table = PageTable(pool)
    table.reserve(CHUNK)
    for count in (CHUNK, SHORT):
        model.run([Rows(table, torch.zeros(count, dtype=torch.int64), 0, wanted="last")])
    device.synchronize()
    return calls + 2


def compile_all(arguments: Sequence[str], names: Sequence[str], limit: float) -> dict[str, float]:
    """Seconds of each model's process; all run at once, and those that are not done in time are stopped and left out.

    Raises RuntimeError with what one said that failed.
    """
    begun = time.monotonic()
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", *arguments, "--compile-only", name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    }
    took = {}
    try:
        for name, process in running.items():
            try:
                said, _ = process.communicate(timeout=max(1.0, limit - (time.monotonic() - begun)))
            except subprocess.TimeoutExpired:
                continue
            if process.returncode:
                raise RuntimeError(f"compiling for {name} ended with {process.returncode}: {said[-1500:]}")
            took[name] = time.monotonic() - begun
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    return took
