"""What a launcher would launch, compiled instead of run: no GPU, and tensors without storage. Prints what came out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.compiling import Compiled, compile_kernel

_TYPES = {
    **{torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"},
    **{torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"},
}
_NUMBERS = {int: "i32", float: "fp32"}


class Launches:
    """Stands where a kernel stands in its module; keeps what each launch compiles to, by the kernel's name."""

    def __init__(self, kernel: Any, kept: dict[str, Compiled], folder: Path, capability: int) -> None:
        self.kernel = kernel
        self.kept = kept
        self.folder = folder
        self.capability = capability

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return self.launch

    def launch(self, *given: Any, num_warps: int, **named: Any) -> None:
        options = {name: named.pop(name) for name in ("num_stages", "enable_fp_fusion")}
        values = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        constants = {p.name: values[p.name] for p in self.kernel.params if p.is_constexpr}
        types = {name: _type(value) for name, value in values.items() if name not in constants}
        made = compile_kernel(self.kernel, types, constants, self.folder, self.capability, num_warps, **options)
        self.kept[self.kernel.__name__] = made
        size = f"{made.registers} registers, {made.stack} B stack, {made.shared} B shared"
        print(f"{self.kernel.__name__} sm_{self.capability}: {size}")


def _type(value: Any) -> str:
    return "*" + _TYPES[value.dtype] if isinstance(value, Tensor) else _NUMBERS[type(value)]


def compile_launches(
    module: ModuleType, kernels: tuple[str, ...], call: Callable[[], object], folder: Path, capability: int
) -> dict[str, Compiled]:
    """Call a launcher of the module with its kernels replaced; what they became, by name."""
    kept: dict[str, Compiled] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in kernels:
            patch.setattr(module, name, Launches(getattr(module, name), kept, folder, capability))
        call()
    return kept
