"""What steps launch, where there is no GPU: real launchers, Triton's own binder, tensors of shapes without numbers.

A launch goes the whole way to the driver, for which there is a stand-in: so a kernel that Triton would compile once
more, for a number that is 1 or even, or for another dtype, is seen here as it would be on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

DEVICE = torch.device("meta")
#: Ops of torch that launch nothing, views aside.
_FREE = ("empty", "new_empty", "detach", "alias", "lift_fresh")
#: Of stand-ins: Triton keeps a kernel's cache for as long as the kernel, and an ``id`` may come again.
_NUMBERS = count()
_EVENT = torch.Event


@dataclass(slots=True)
class Launches:
    """kernels: launches of ours, by name. compiled: of each, for what Triton compiled it. torch: launches of its ops.

    binaries: of kernels that were really compiled, what Triton made.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    compiled: dict[str, set[str]] = field(default_factory=dict)
    torch: Counter[str] = field(default_factory=Counter)
    binaries: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Of both kinds."""
        return self.kernels.total() + self.torch.total()

    @property
    def variants(self) -> dict[str, int]:
        """How often each kernel is compiled."""
        return {name: len(keys) for name, keys in self.compiled.items()}


class _Driver:
    """Stands where a GPU's driver stands: a kernel is bound, and compiled if wanted, and then nothing is run."""

    def __init__(self, capability: int, launches: Launches, compiling: bool) -> None:
        self.launches, self.compiling, self.utils = launches, compiling, self
        self._target = GPUTarget("cuda", capability, 32)
        self._device = f"none, {next(_NUMBERS)}"  # a cache of its own, for this capability

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: str) -> tuple[None, int, int, int, int]:
        return None, 0, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What a compiled kernel is launched by."""
        return lambda *_: None

    def seen(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Called for each launch of a kernel that is not compiled; whether that shall be left out."""
        name = fn.name.rsplit(".", 1)[-1]
        self.launches.kernels[name] += 1
        self.launches.compiled.setdefault(name, set()).add(key)
        return not self.compiling

    def made(self, *, key: str, fn: Any, **_: Any) -> None:
        """Called for each kernel that was compiled."""
        name = fn.name.rsplit(".", 1)[-1]
        cache = fn.jit_function.device_caches[self._device][0]
        self.launches.binaries[f"{name} {len(self.launches.compiled[name])}"] = cache[key]


class _Counted(TorchDispatchMode):
    """Counts the ops of torch that a GPU would launch a kernel for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        made = func(*args, **kwargs)
        name = func.name().removeprefix("aten::")
        there = any(isinstance(one, torch.Tensor) and one.device == DEVICE for one in (*args, made))
        if there and not func.is_view and not name.startswith(_FREE):
            self._counts[name] += 1
        return made


@contextmanager
def bound(capability: int = 90, compiling: bool = False, counting: bool = True) -> Iterator[Launches]:
    """In this block Triton finds a GPU, and if ``counting`` tensors on :data:`DEVICE` count as its own, and torch's ops
    are counted. compiling: whether kernels are compiled too, each once, for ``sm_<capability>``; launches of one that
    is there already are then not counted."""
    launches = Launches()
    stand_in = _Driver(capability, launches, compiling)
    before = driver._active
    driver.set_active(stand_in)
    with ExitStack() as stack:
        stack.callback(lambda: setattr(driver, "_active", before))
        if torch.Event is _EVENT:  # else those of a simulated device
            stack.enter_context(patch.object(torch, "Event", lambda *_: MagicMock()))
        stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", stand_in.seen))
        stack.enter_context(patch.object(knobs.runtime, "jit_post_compile_hook", stand_in.made))
        if counting:
            stack.enter_context(on_gpu())
            stack.enter_context(_Counted(launches.torch))
        yield launches


@contextmanager
def on_gpu() -> Iterator[None]:
    """In this block tensors on :data:`DEVICE` say that they are a GPU's."""
    with patch.object(torch.Tensor, "is_cuda", property(lambda self: self.device == DEVICE)):
        yield
