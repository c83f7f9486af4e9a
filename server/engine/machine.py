"""This machine's memory, how much of it is free, and its processor's abilities. Does not import torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from foresay.verifier.ops.kernels.cpu.jit import Processor

#: Files with a container's memory limit (cgroup v2, v1); absent on bare machines.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
#: Device files of GPU drivers: NVIDIA's, NVIDIA's under WSL, AMD's.
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
#: Instructions that multiply bf16, as LLVM names them.
_BF16 = ("avx512bf16", "amx-bf16", "bf16")


def machine_bytes() -> int:
    """Most bytes that this process may hold: the machine's memory, or the container's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max" means no limit
            limits.append(int(Path(file).read_text()))
    return min(limits)


def free_bytes() -> int | None:
    """Bytes free now, including the page cache; None if the system does not report them."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "none"))
    return None


def may_have_gpu() -> bool:
    """Whether it is worth a second or two to let torch look for a GPU."""
    return any(Path(name).exists() for name in _GPUS)


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bf16 natively."""
    return any(map(Processor.here().has, _BF16))
