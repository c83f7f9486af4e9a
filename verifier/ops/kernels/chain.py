"""Kernels that are there before the one in front of them has ended (programmatic dependent launch).

Every kernel of ours begins alike: it lets the next one be brought up, and waits until the one before it is done, so
that nothing of a step is read or written earlier. As each waits for the one before, which waited itself, a kernel that
is done has all those before it done too. What never changes, weights, is asked for ahead of that: a norm's, and the
beginning of a product's, which it brings into the L2 while what is before it leaves memory idle.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

#: Whether kernels are launched so at all; read at each launch. TRITON_PDL=0 in the environment switches it off, should
#: a driver do it wrong.
PDL = os.environ.get("TRITON_PDL", "1") != "0"


@triton.jit
def wait_turn(CHAINED: tl.constexpr):
    """What every kernel does before it reads what is not constant, and before it writes."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def bring(pointers):
    """Have the lines that these point to in the L2."""
    asked: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asked, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def chained() -> dict[str, bool]:
    """How a kernel that does so is launched: GPUs can from compute capability 9.0 on."""
    able = PDL and not knobs.runtime.interpret and capability() >= 90
    return {"CHAINED": able, "launch_pdl": able}


def capability() -> int:
    """Of the current GPU: 90 is 9.0. Every launch asks."""
    return _capability_of(driver.active.get_current_device())


@cache
def _capability_of(device: Hashable) -> int:
    """By what names the device as long as the process lives, a number or a stand-in's own: the driver takes longer."""
    return int(driver.active.get_current_target().arch)
