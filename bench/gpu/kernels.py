"""Part b: every kernel against its reference, and the bandwidth it reaches over the probed one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench import record
from bench.gpu.case import Case
from bench.gpu.cases import Cases
from bench.gpu.device import Call, Device
from bench.gpu.session import Clock

#: Largest relative error by dtype: rounding of the inputs and outputs, with room, far below any wrong index.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
#: Input sets that are rotated at most, and the memory they may take.
MOST_SETS = 32
SETS_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Result:
    """One op at one shape. error: relative; of tokens the share that differs. seconds: of one call, inputs not cached.
    share: of the probed read bandwidth."""

    name: str
    error: float
    passed: bool
    seconds: float
    share: float


def error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||, not a number if anything is; of integers the share that differs."""
    if not found.is_floating_point():
        return float((found.cpu() != wanted.cpu()).double().mean())
    difference = (found.double() - wanted.double().to(found.device)).norm()
    return float(difference / wanted.double().norm())


def check(device: Device, case: Case) -> tuple[float, bool]:
    """The error on inputs never used before, and whether it is within its limit."""
    found = error(*case.outcome())
    limit = LIMITS[device.dtype] if case.limit is None else case.limit
    return found, found <= limit


def rotated(device: Device, case: Case, run: Any) -> tuple[Call, int]:
    """One launch of many calls whose inputs together are over three times the cache, and how many they are."""
    first = case.make()
    size = max(1, sum(tensor.nbytes for tensor in first))
    count = min(MOST_SETS, max(1, SETS_BYTES // size), max(2, math.ceil(3 * device.cache_bytes / size)))
    sets = [first, *(case.make() for _ in range(count - 1))]

    def all_of_them() -> None:
        for inputs in sets:
            run(*inputs)

    return device.captured(all_of_them), count


def seconds_of(device: Device, case: Case, run: Any, patience: float) -> float:
    """Median seconds of one call."""
    call, count = rotated(device, case, run)
    return median(device.sample(call, patience)) / count


def measure(device: Device, cases: Iterable[Case], read: float, clock: Clock, patience: float) -> list[Result]:
    """Check and time each case. read: bytes per second of the probe."""
    results = []
    for case in cases:
        if clock.fits(f"kernel {case.name}", 2 * patience):
            found, passed = check(device, case)
            took = seconds_of(device, case, case.run, patience)
            results.append(Result(case.name, found, passed, took, case.bytes / took / read))
            device.free()
    return results


def against_library(
    device: Device, cases: Cases, rows: Sequence[int], read: float, clock: Clock, patience: float
) -> list[dict[str, Any]]:
    """The library's product beside the skinny one, in turns, at every width of the model."""
    compared = []
    for name, outer, inner in (*cases.products(), ("gate_up", 2 * cases.config.intermediate_size, inner_of(cases))):
        for count in rows:
            case = cases.product(name, outer, inner, count)
            if clock.fits(f"library beside {case.name}", 3 * patience):
                ours, theirs = (
                    seconds_of(device, case, run, patience) for run in (case.run, partial(functional.linear, bias=None))
                )
                compared.append(
                    {"weight": name, "rows": count, "ours_us": 1e6 * ours, "library_us": 1e6 * theirs}
                    | {"ours_over_library": ours / theirs, "library_share": case.bytes / theirs / read}
                )
    return compared


def inner_of(cases: Cases) -> int:
    """What the gate's product reads."""
    return cases.config.hidden_size


def show(results: Sequence[Result]) -> None:
    """The table of one model's kernels."""
    rows = [[r.name, f"{r.error:.1e}", "yes" if r.passed else "NO", 1e6 * r.seconds, r.share] for r in results]
    record.table("kernels", ["op", "error", "within", "us", "of probed bandwidth"], rows)


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For the record."""
    return [asdict(result) for result in results]


def show_library(compared: Sequence[dict[str, Any]]) -> None:
    """The table of products beside the library's."""
    rows = [
        [f"{c['weight']}, {c['rows']} rows", c["ours_us"], c["library_us"], c["ours_over_library"]] for c in compared
    ]
    record.table("skinny linears beside the library's", ["weight", "ours us", "library us", "ratio"], rows)
