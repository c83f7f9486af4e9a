"""Dispatch of ops: to the torch reference, or to a GPU or CPU kernel. References have derivatives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

from torch import Tensor

_references: ContextVar[bool] = ContextVar("references", default=False)
#: Whether Triton's kernels are run by its interpreter, on CPU tensors: then an op that only has a Triton kernel is
#: computed by torch, unless its kernel is called by name.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def references() -> Iterator[None]:
    """In this block ops are computed by their torch references, slowly."""
    token = _references.set(True)
    try:
        yield
    finally:
        _references.reset(token)


def compiled(x: Tensor) -> bool:
    """Whether an op on this tensor runs a compiled CPU kernel."""
    return x.device.type == "cpu" and not (Op.by_reference or _references.get())


class Op(Generic[P, R]):
    """An op: a torch function that is its reference, and faster implementations for the device of its first argument.

    gpu, cpu: the files in kernels and in kernels/cpu that have a function with the op's name and arguments; or it is
    given by a decorator, :meth:`kernel` for both. On a device without one the reference runs. by_reference: whether it
    runs on a CPU anyway, for all ops of the process: where kernels cannot be compiled.
    """

    by_reference: ClassVar[bool] = False

    def __init__(self, reference: Callable[P, R], gpu: str | None, cpu: str | None) -> None:
        update_wrapper(self, reference)
        self._reference, self._files = reference, (gpu, cpu and f"cpu.{cpu}")
        self.launch: Callable[P, R] = reference

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = _tensor_of(args[0] if args else next(iter(kwargs.values())))
        if first.is_cuda and not _references.get():
            return self._of_gpu(*args, **kwargs)
        return (self._of_cpu if compiled(first) else self._reference)(*args, **kwargs)

    def kernel(self, launch: Callable[P, R]) -> Callable[P, R]:
        """Decorates the launcher of a kernel for both."""
        self.launch, self._of_gpu, self._of_cpu = launch, launch, self._reference if INTERPRETED else launch
        return launch

    @property
    def has_gpu_kernel(self) -> bool:
        """Whether a GPU runs one of our kernels for it."""
        return self._of_gpu is not self._reference

    @cached_property
    def _of_gpu(self) -> Callable[P, R]:
        return self._found(self._files[0])

    @cached_property
    def _of_cpu(self) -> Callable[P, R]:
        return self._found(self._files[1])

    def _found(self, file: str | None) -> Callable[P, R]:
        if file is None:
            return self._reference
        found: Callable[P, R] = getattr(import_module(f"foresay.verifier.ops.kernels.{file}"), self._reference.__name__)
        return found


class _Decorator(Protocol):
    def __call__(self, reference: Callable[P, R]) -> Op[P, R]: ...


def op(gpu: str | None = None, cpu: str | None = None) -> _Decorator:
    """Decorates the reference of an :class:`Op`."""

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        return Op(reference, gpu, cpu)

    return decorate


def _tensor_of(argument: Any) -> Tensor:
    """The first tensor of an argument, which may be a tuple or a record of tensors."""
    while not isinstance(argument, Tensor):
        argument = argument[0] if isinstance(argument, tuple) else getattr(argument, fields(argument)[0].name)
    return argument
