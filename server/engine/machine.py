"""How much memory this machine has, how much of it is free, and what its processor can. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from foresay.verifier.ops.kernels.cpu.jit import Processor

#: Where a container's limit is written (cgroup v2, v1); on a bare machine there is none.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
#: What drivers leave where there is a GPU: NVIDIA's, the same under WSL, AMD's.
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
#: Instructions that multiply bf16, as LLVM names them.
_BF16 = ("avx512bf16", "amx-bf16", "bf16")


def machine_bytes() -> int:
    """What this process may hold at most: the machine's memory, or the container's share of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max" where there is no limit
            limits.append(int(Path(file).read_text()))
    return min(limits)


def free_bytes() -> int | None:
    """What is free now, files that are merely cached counted as free; None where the system does not say."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "none"))
    return None


def may_have_gpu() -> bool:
    """Whether it is worth a second or two to ask torch for a GPU."""
    return any(Path(name).exists() for name in _GPUS)


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bf16 natively."""
    return any(map(Processor.here().has, _BF16))
