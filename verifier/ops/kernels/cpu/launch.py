"""Running a kernel: now, or as an entry of the current recording; and the memory that it writes to."""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from foresay.verifier.ops.kernels.cpu import kernel_cache, threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.compiler import CompilationFailed
from foresay.verifier.ops.kernels.cpu.jit import Code, Processor
from foresay.verifier.ops.kernels.cpu.torch_ops import Traced

#: A kernel's argument: the data of a tensor, or a number.
Argument = Tensor | int
_LINE = 64
#: Bytes of an entry: the addresses of the kernel and of its arguments.
_PAIR = 16


class Recording:
    """A list of entries, recorded once and replayed. It owns all memory that its kernels use.

    Everything that changes between two replays, including the number of rows, is the content of a tensor. Kernels write
    to the recording's own memory, which a later entry reuses when no tensor refers to it any more. Torch ops are
    entries too (:mod:`~foresay.verifier.ops.kernels.cpu.torch_ops`), and it may be cut into parts: see :meth:`cut`.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []
        self._kept: list[object] = []
        self._table = np.empty(0, dtype=np.int64)
        self._arenas: list[_Arena] = []
        self._own: set[int] = set()
        self._parts: list[list[_Step]] = [[]]
        self._joined: dict[tuple[int, int], list[_Step]] = {}

    def add(self, address: int, arguments: tuple[Argument, ...], code: object) -> None:
        """Add an entry."""
        block = _block(arguments)
        self._entries.append((address, block.ctypes.data))
        part = self._parts[-1]
        last = part[-1] if part else None
        if not isinstance(last, _Kernels):
            last = _Kernels(len(self._entries) - 1)
            part.append(last)
        last.count += 1
        tensors = (one for one in arguments if isinstance(one, Tensor))
        foreign = [one for one in tensors if one.untyped_storage().data_ptr() not in self._own]
        self._kept += [block, code, *foreign]

    def add_torch(self, run: Callable[[], object]) -> None:
        """Add an entry that runs torch."""
        self._parts[-1].append(run)

    def cut(self) -> None:
        """End a part: here the host may read and change results before it continues with the next part."""
        self._parts.append([])

    def allocate(self, size: int) -> _Arena:
        """Memory for a tensor of this many bytes."""
        for room in self._arenas:
            if room.size == size and room.is_free():
                return room
        self._arenas.append(_Arena(size))
        self._own.add(self._arenas[-1].address)
        return self._arenas[-1]

    def close(self) -> None:
        """End the recording: nothing can be added afterwards."""
        self._table = np.array(self._entries, dtype=np.int64).reshape(-1)

    def __call__(self) -> None:
        """Run all entries."""
        self.run(0, len(self._parts))

    def run(self, part: int, end: int | None = None) -> None:
        """Run the entries between two cuts, or all from one cut to another: ``end`` is a part's number."""
        between = part, end or part + 1
        if between not in self._joined:
            self._joined[between] = _joined(self._parts[slice(*between)])
        for each in self._joined[between]:
            if isinstance(each, _Kernels):
                threads.run(self._table.ctypes.data + each.first * _PAIR, each.count)
            else:
                with torch.inference_mode():
                    each()


@dataclass(slots=True)
class _Kernels:
    """Entries that are run in one call."""

    first: int
    count: int = 0


#: Kernels, or a torch op.
_Step = _Kernels | Callable[[], object]


def _joined(parts: Sequence[Sequence[_Step]]) -> list[_Step]:
    """The parts without the cuts between them."""
    steps: list[_Step] = []
    for each in (each for part in parts for each in part):
        last = steps[-1] if steps else None
        if isinstance(each, _Kernels) and isinstance(last, _Kernels):
            steps[-1] = _Kernels(last.first, last.count + each.count)
        else:
            steps.append(each)
    return steps


class _Arena:
    """Memory that is used by one tensor after another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = np.zeros(size + _LINE, dtype=np.uint8)  # traced ops run on this, with valid indices
        begin = -self._bytes.ctypes.data % _LINE
        self._bytes = self._bytes[begin : begin + size]
        self.address = self._bytes.ctypes.data
        self._user: StorageWeakRef | None = None

    def is_free(self) -> bool:
        """Whether no tensor uses it any more."""
        return self._user is None or self._user.expired()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in this memory."""
        made = torch.frombuffer(self._bytes, dtype=dtype, count=prod(shape)).view(*shape)
        self._user = StorageWeakRef(made.untyped_storage())
        return made


class _Open(threading.local):
    """This thread's current recording."""

    recording: Recording | None = None


_open = _Open()


@contextmanager
def recording() -> Iterator[Recording]:
    """Kernels launched in the block are recorded, and not run."""
    assert _open.recording is None, "one recording at a time"
    made = _open.recording = Recording()
    try:
        with Traced(made.add_torch):
            yield made
    finally:
        _open.recording = None
    made.close()


def arena(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor for what a kernel writes."""
    if _open.recording is None or not prod(shape):
        return torch.empty(*shape, dtype=dtype)
    return _open.recording.allocate(prod(shape) * dtype.itemsize).tensor(shape, dtype)


def zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Memory that is zero when a kernel first runs, and that the kernel leaves zero: no entry clears it again."""
    return torch.frombuffer(bytearray(count * dtype.itemsize), dtype=dtype)


def alias(tensor: Tensor) -> Tensor:
    """A tensor of the same memory of a recording, valid as long as that; later entries may still reuse the memory.
    Outside a recording, the tensor itself."""
    if _open.recording is None:
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def counted(count: Tensor | None, rows: int) -> Tensor:
    """int64[1]: how many rows a kernel processes, ``rows`` by default."""
    return _number(rows) if count is None else count


@cache
def _number(value: int) -> Tensor:
    return torch.tensor([value])


class Launcher:
    """A compiled kernel."""

    def __init__(self, name: str, code: Code) -> None:
        self._code = code
        self._address = code.address(name)

    def __call__(self, *arguments: Argument) -> None:
        """Run it with these arguments, or record that."""
        if _open.recording is not None:
            _open.recording.add(self._address, arguments, self._code)
            return
        block = _block(arguments)
        entry = np.array((self._address, block.ctypes.data), dtype=np.int64)
        threads.run(entry.ctypes.data, 1)


def _block(arguments: tuple[Argument, ...]) -> np.ndarray:
    gaps = [one.shape for one in arguments if isinstance(one, Tensor) and not one.is_contiguous()]
    assert not gaps, f"a kernel reads numbers one behind the other, of shapes {gaps} too"
    return np.array([one if isinstance(one, int) else one.data_ptr() for one in arguments], dtype=np.int64)


class Compiled:
    """Decorates a function that writes a kernel for some constants: it is compiled once for each of these.

    Writing the text that is the key of compiled code takes longer than loading the code, so if the source files are
    what runs (``kernel_cache.unpatched``) the code is also found by function, constants and the state of the sources.

    Where LLVM fails, the kernel is written again for fewer rows at once, if the function can (``most``): sums keep
    their order, so their bits. Raises CompilationFailed if nothing is left to try.
    """

    def __init__(self, write: Callable[..., Kernel]) -> None:
        self.write = write
        self._made: dict[tuple[object, ...], Launcher | str] = {}
        self._tiles = ({}, {"most": 2}, {"most": 1}) if "most" in signature(write).parameters else ({},)

    def __call__(self, *constants: object) -> Launcher:
        """The kernel for these."""
        key = (Processor.here(), *constants)
        if key not in self._made:
            self._made[key] = self._found(constants) if kernel_cache.unpatched else self._written(constants)[0]
        made = self._made[key]
        if isinstance(made, str):
            raise CompilationFailed(made)
        return made

    def _found(self, constants: tuple[object, ...]) -> Launcher | str:
        """The kernel from code compiled from these sources before, or now."""
        processor, write = Processor.here(), self.write
        described = pickle.dumps((write.__module__, write.__qualname__, constants), protocol=5).hex()
        source = processor.key_of("kernel", described, kernel_cache.sources())
        key, name, fault = (kernel_cache.load(source) or b"\n\n").decode().split("\n", 2)
        if fault:
            llvm_errors.append(fault)
        if fault and not key:
            return fault
        if key and (code := Code.load(key, processor)) is not None:
            return Launcher(name, code)
        made, known_as = self._written(constants)
        kernel_cache.save(source, known_as.encode())
        return made

    def _written(self, constants: tuple[object, ...]) -> tuple[Launcher | str, str]:
        """A new one, or why there is none; and its key, its name and what failed before, as lines."""
        fault = ""
        for tile in self._tiles:
            kernel = self.write(*constants, **tile)
            try:
                code = kernel.code()
            except CompilationFailed as error:
                fault = f"{kernel.name}: {error}"
                llvm_errors.append(fault)
            else:
                return Launcher(kernel.name, code), "\n".join((code.key, kernel.name, fault))
        return fault, f"\n\n{fault}"


#: Why LLVM did not compile kernels as they were first written.
llvm_errors: list[str] = []
