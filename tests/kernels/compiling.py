"""Compiling a kernel for a GPU that is not here, and reading what came out."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one target. registers: per thread. stack: bytes per thread, where spilled registers go."""

    ptx: str
    registers: int
    stack: int
    shared: int


def compile_kernel(
    kernel: Any,
    arguments: dict[str, str],
    constants: dict[str, Any],
    folder: Path,
    capability: int,
    warps: int = 4,
    **options: Any,
) -> Compiled:
    """Compile for ``sm_<capability>``.

    arguments: the type of each argument that is no constexpr, such as "*bf16" or "i32". Pointers count as
    aligned to 16 bytes, as torch's tensors are. folder: where the binary is written.
    options: those of the launch.
    """
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    even = [n for n, name in enumerate(kernel.arg_names) if arguments.get(name, "fp32")[0] == "*"]
    attributes = {(n,): [["tt.divisibility", 16]] for n in even}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, **options})
    binary = folder / f"{kernel.__name__}.{capability}.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = resource_usage(binary)
    return Compiled(made.asm["ptx"], usage["REG"], usage["STACK"] + usage["LOCAL"], made.metadata.shared)


def resource_usage(binary: Path) -> dict[str, int]:
    """What the binary's own header says it takes, such as {"REG": 32, "STACK": 0, "LOCAL": 0}."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([str(tool), "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
