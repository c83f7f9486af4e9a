"""A device that is not the CPU, for machines that have no other: it refuses what a GPU would refuse.

Its tensors say that they are on ``meta`` and hold a CPU tensor each, on which every op is carried out. An op that is
given tensors of both devices raises, except where torch lets CUDA tensors meet those of the CPU: numbers without a
dimension, copies, and indices. What only a kernel does (attention over page tables) is done by its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import verifier.ops.attention
from verifier.ops.tree_attention import PagedRows, tree_attention

NAME = "meta"
_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class Elsewhere(torch.Tensor):
    """A tensor of that device. here: what it holds."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            dtype=here.dtype,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            device=torch.device(NAME),
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.here.tolist()


class _Mode(TorchDispatchMode):
    """Sees every op, so that tensors can be made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._can_decompose():  # under inference mode composed ops arrive whole
            with self:
                return func.decompose(*args, **kwargs or {})
        return _run(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, torch knows the device by the name ``meta``, and the model's attention runs there."""
    with pytest.MonkeyPatch.context() as patch, _Mode(), torch.inference_mode():
        patch.setattr(verifier.ops.attention, "tree_attention", _kernel)
        yield


def _here(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.here
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = tree_leaves((args, kwargs))
    there = [value for value in given if isinstance(value, Elsewhere)]
    others = [
        value for value in given if isinstance(value, Tensor) and not isinstance(value, Elsewhere) and value.dim()
    ]
    device = kwargs.get("device")
    goes = bool(there) if device is None else torch.device(device).type == NAME
    if func is _aten.copy_.default:
        goes = isinstance(args[0], Elsewhere)
    elif func is not _aten._to_copy.default and there and others:
        indexed = func in _INDEXING and isinstance(args[0], Elsewhere)
        values = [value for value in args[2:] if isinstance(value, Tensor)]
        if not indexed or not all(isinstance(value, Elsewhere) or not value.dim() for value in values):
            raise RuntimeError(f"{func}: some of its tensors are on the CPU, others are not")
    result = func(*tree_map(_here, args), **tree_map(_here, dict(kwargs)))
    return tree_map(lambda value: _back(value, given, goes), result)


def _back(value: Any, given: list[Any], goes: bool) -> Any:
    """A result as the caller has to see it: an op in place returns what it was given."""
    if not isinstance(value, Tensor):
        return value
    for one in given:
        if one is value or (isinstance(one, Elsewhere) and one.here is value):
            return one
    return Elsewhere(value) if goes else value


def _kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    first: int = 0,
) -> Tensor:
    """What the GPU's kernel asks for, and then its reference."""
    tensors = {field.name: getattr(rows, field.name) for field in fields(rows) if field.name != "page_size"}
    for tensor in (query, keys, values, *tensors.values()):
        assert tensor is None or (isinstance(tensor, Elsewhere) and tensor.here.is_contiguous())
    assert {tensors[name].dtype for name in ("tables", "lengths", "offsets")} == {torch.int32}
    held = replace(rows, **tree_map(_here, tensors))
    with _disable_current_modes():  # it goes row by row: thousands of ops that nobody needs to see
        seen = tree_attention(_here(query), _here(keys), _here(values), held, scale, window, first)
    return Elsewhere(seen)
