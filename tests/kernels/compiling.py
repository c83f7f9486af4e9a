"""Compiling a kernel for a GPU that is not here, and reading what came out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.binder import bound

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
    return read(made, folder / f"{kernel.__name__}.{capability}.cubin")


def compile_launches(call: Callable[[], object], folder: Path, capability: int) -> dict[str, Compiled]:
    """What launchers launch on tensors of shapes alone, compiled; by the kernel's name. Prints what came out."""
    with bound(capability, compiling=True, counting=False) as launches:
        call()
    made = {key.split()[0]: read(each, folder / f"{key}.{capability}.cubin") for key, each in launches.binaries.items()}
    assert len(made) == len(launches.binaries), "each kernel once"
    for name, one in made.items():
        print(f"{name} sm_{capability}: {one.registers} registers, {one.stack} B stack, {one.shared} B shared")
    return made


def read(made: Any, binary: Path) -> Compiled:
    """What Triton made of a kernel. binary: where it is written."""
    binary.write_bytes(made.asm["cubin"])
    usage = resource_usage(binary)
    return Compiled(made.asm["ptx"], usage["REG"], usage["STACK"] + usage["LOCAL"], made.metadata.shared)


def resource_usage(binary: Path) -> dict[str, int]:
    """What the binary's own header says it takes, such as {"REG": 32, "STACK": 0, "LOCAL": 0}."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    output = subprocess.run([str(tool), "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output)}
