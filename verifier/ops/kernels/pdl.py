"""Kernels that are launched before the previous one has ended (programmatic dependent launch).

Each of our kernels begins in the same way: it allows the next one to launch, and waits until the one before it has
finished, so that no data of a step is read or written earlier. As each waits for the one before, which also waited, all
kernels before a finished one have finished too. Constant data, weights, is fetched ahead of the wait: a norm's, and the
beginning of a product's, which goes into the L2 while the kernels before leave memory idle.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

#: Whether kernels are launched this way; read at each launch. TRITON_PDL=0 in the environment switches it off, in case
#: of a faulty driver.
PDL = os.environ.get("TRITON_PDL", "1") != "0"


@triton.jit
def gdc_wait(USE_GDC: tl.constexpr):
    """Every kernel calls this before it reads data that is not constant, and before it writes."""
    if USE_GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(pointers):
    """Prefetch the lines at these pointers into the L2."""
    instruction: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(instruction, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def pdl_args() -> dict[str, bool]:
    """Launch options of such a kernel: supported from compute capability 9.0 on."""
    able = PDL and not knobs.runtime.interpret and capability() >= 90
    return {"USE_GDC": able, "launch_pdl": able}


def capability() -> int:
    """Compute capability of the current GPU: 90 is 9.0. Called at every launch."""
    return _capability_of(driver.active.get_current_device())


@cache
def _capability_of(device: Hashable) -> int:
    """By what names the device as long as the process lives, a number or a stand-in's own: the driver takes longer."""
    return int(driver.active.get_current_target().arch)
