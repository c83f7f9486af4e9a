"""A processor, and code that was compiled for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from foresay.verifier.ops.kernels.cpu import compiler, kernel_cache
from foresay.verifier.ops.kernels.cpu.compiler import Job


@dataclass(frozen=True)
class Processor:
    """The target of code generation. name, features, triple: LLVM's."""

    name: str
    features: str
    triple: str = llvm.get_default_triple()

    @classmethod
    @cache
    def here(cls) -> Processor:
        """The processor that this program runs on."""
        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    def has(self, feature: str) -> bool:
        """Whether it has instructions of this name."""
        return f"+{feature}" in self.features.split(",")

    @cached_property
    def multiplies_bf16(self) -> bool:
        """Whether one instruction multiplies pairs of bf16 and adds them to fp32."""
        return self.has("avx512bf16")

    @cached_property
    def converts_fp16(self) -> bool:
        """Whether there are instructions from fp16 to fp32 and back."""
        return not self.is_x86 or self.has("f16c") or self.has("avx512f")

    @cached_property
    def wide(self) -> bool:
        """Whether there are 32 registers of 16 numbers, instead of 16 of 8, and they hold bytes too: AVX-512, but for
        Xeon Phi's."""
        return self.has("avx512bw")

    @cached_property
    def has_byte_dots(self) -> bool:
        """Whether one instruction multiplies four bytes and adds them to 32 bits."""
        return self.has("avx512vnni") or self.has("avxvnni")

    @cached_property
    def multiplies_bytes(self) -> bool:
        """Whether it multiplies 8-bit integers at all."""
        return self.is_x86 and self.has("avx2")

    @property
    def is_x86(self) -> bool:
        """Whether it has x86's instructions."""
        return self.triple.startswith("x86_64")

    def key_of(self, *parts: str) -> str:
        """A hash of these, the processor, and LLVM."""
        versions = str(llvm.llvm_version_info), llvmlite.__version__
        return kernel_cache.key_of(*parts, self.triple, self.name, self.features, *versions)

    def machine(self) -> Any:
        """LLVM's code generator for it."""
        return compiler.machine(self.triple, self.name, self.features)

    def compiled(self, text: str) -> bytes:
        """The machine code of LLVM IR, as an object file. Raises CompilationFailed."""
        return compiler.compiled(Job(text, self.triple, self.name, self.features))


class Code:
    """Compiled functions. Owns their memory: addresses are valid as long as this object lives. Raises
    CompilationFailed."""

    def __init__(self, text: str, processor: Processor | None = None) -> None:
        processor = processor or Processor.here()
        self.key = processor.key_of(text)
        code = kernel_cache.load(self.key)
        if code is None:
            code = processor.compiled(text)
            kernel_cache.save(self.key, code)
        self._load(code, processor.machine())

    @classmethod
    def load(cls, key: str, processor: Processor) -> Code | None:
        """Code that was compiled before and stored under this key; None if it is no longer there."""
        if (code := kernel_cache.load(key)) is None:
            return None
        made = cls.__new__(cls)
        made.key = key
        made._load(code, processor.machine())
        return made

    def _load(self, code: bytes, machine: Any) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """The address of a function."""
        found: int = self._engine.get_function_address(name)
        assert found, f"{name} was compiled"
        return found
