"""Where the kernels of these tests run: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.worker import BROKEN

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter keeps bf16 as raw integers, and truncates where a GPU rounds. A GPU serves nothing in fp32: nothing is
# compiled for that.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
#: Where bits are compared: results of 16 bits hide most of what another order of sums does to 32.
EXACT = torch.float32 if INTERPRETED else torch.bfloat16


if INTERPRETED:
    from triton import language
    from triton.runtime import interpreter

    # Triton puts the interpreter's words in place anew for each function that a kernel calls, which takes half of the
    # time. Nothing is compiled in this process: here they stay.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    # A third of what is left: whether each sum of integers fits is computed, and asserted in debug mode alone.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

    @functools.cache
    def _checked(shape: tuple[int, ...]) -> tuple[Any, int]:
        return language.core.tuple(shape), language.core.validate_block_shape(shape)

    def _block(self: Any, element_ty: Any, shape: Any) -> None:
        if not shape:
            raise TypeError("a block has dimensions")  # and what has none is taken for a number
        self.element_ty = element_ty
        self.shape, self.numel = _checked(tuple([n if isinstance(n, int) else n.value for n in shape]))

    @functools.cache
    def _words(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return language.core.tuple([language.constexpr(n) for n in shape]), language.constexpr(math.prod(shape))

    def _tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _words(tuple(type.shape) if type.is_block() else ())

    language.core.tensor.__init__ = _tensor
    language.core.block_type.__init__ = _block
    language.core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    _number = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: np.dtype(np.uint64) if type.scalar.is_ptr() else _number(type.scalar)

    # Most operands of most operations have one type and one shape: nothing is to be promoted, cast or stretched then.
    _semantic, _dtype = language.semantic.TritonSemantic, language.core.dtype
    _stretched, _promoted = _semantic.broadcast_impl_value, _semantic.binary_op_type_checking_impl
    _common, _equal = functools.cache(np.broadcast_shapes), _dtype.__eq__

    @functools.cache
    def _numbers(kind: Any) -> range:
        """All that an integer of this type can be; none if it is another type."""
        whole = kind.is_int() and not kind.is_int1()
        return range(kind.get_int_min_value(), kind.get_int_max_value() + 1) if whole else range(0)

    def _stretch(self: Any, left: Any, right: Any) -> Any:
        if not (left.type.is_block() and right.type.is_block()):
            return _stretched(self, left, right)
        if left.type.shape is right.type.shape:
            return left, right
        shapes = [tuple(each.type.shape.values) for each in (left, right)]
        if len(shapes[0]) != len(shapes[1]):
            return _stretched(self, left, right)
        shape = _common(*shapes)

        def whole(each: Any, its: tuple[int, ...]) -> Any:
            if its == shape:
                return each
            wide = language.core.block_type(each.dtype, shape)
            return self.tensor(self.builder.create_broadcast(each.handle, shape), wide)

        return whole(left, shapes[0]), whole(right, shapes[1])

    def _promote(self: Any, left: Any, right: Any, *how: Any, **named: Any) -> Any:
        divides = len(how) > 3 or "div_or_mod" in named
        if type(left) is language.core.tensor and not divides and not left.dtype.is_ptr():
            if type(right) is int and right in _numbers(left.dtype):
                right = self.scalar_constant(right, left.dtype)
            if type(right) is language.core.tensor and left.dtype is right.dtype:
                return _stretch(self, left, right)
        return _promoted(self, left, right, *how, **named)

    _semantic.broadcast_impl_value, _semantic.binary_op_type_checking_impl = _stretch, _promote
    _dtype.__eq__ = lambda self, other: self is other or _equal(self, other)

    def _dot(_: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        """What tensor cores promise, and a BLAS does not on every CPU: that a row is summed up in one order, wherever
        in its block it stands."""
        product = np.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _dot

    def _shift(name: str) -> Any:
        """Compilers may make anything of a shift by as many bits as there are, or more; numpy does not say so."""
        shifted = getattr(interpreter.InterpreterBuilder, name)

        def shift(self: Any, value: Any, count: Any) -> Any:
            assert ((count.data >= 0) & (count.data < 8 * value.data.itemsize)).all(), "a shift by too many bits"
            return shifted(self, value, count)

        return shift

    for _name in ("create_shl", "create_lshr", "create_ashr"):
        setattr(interpreter.InterpreterBuilder, _name, _shift(_name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A process in which the GPU answers no more ends, since every later test would fail there: another of xdist's
    goes on."""
    report = yield
    if report.failed and BROKEN.search(report.longreprtext):
        print(report.longreprtext, file=sys.__stderr__)
        print(f"{item.nodeid} FAILED  [ the GPU answers no more ]", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report


def noise(device: torch.device, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, always the same of one shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("needs a CUDA device; tests/kernels/test_interpreter.py runs this in Triton's interpreter")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes of activations."""
    kind: torch.dtype = request.param
    return kind
