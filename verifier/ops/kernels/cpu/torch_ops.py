"""Torch ops as entries of a recording: those that have no kernel yet, or are not worth one.

While recording, kernels write nothing, so numbers are unknown: a torch op is run once for the shape of its result, and
again at each replay, into the same memory. Views read nothing and are not run again. Ops that would copy a number to
the host are refused, as by a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
#: Ops that return values to the host, or need them for the shape of their result.
_READS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.item.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.equal.default,
    _ATEN.unique_dim.default,
    _ATEN._unique2.default,
}
_REPEATS = {_ATEN.repeat_interleave.Tensor, _ATEN.repeat_interleave.self_Tensor}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
#: Ops with nothing to run again: of :func:`torch.tensor`, which makes a constant, and views, which are most ops.
_NOTHING = {
    _ATEN.lift_fresh.default,
    _ATEN.detach_.default,
    _ATEN.view.default,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.unsqueeze.default,
}


class ReadsNumbers(RuntimeError):
    """A recorded step reads a number on the host: replays would always use the recording's."""


class Traced(TorchDispatchMode):
    """Passes every torch op that writes something to ``add``, as a function that runs it again."""

    def __init__(self, add: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self._add = add

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, which takes a second, although nothing here is compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NOTHING:
            return func(*args, **kwargs)
        if asks_for_numbers(func, args, kwargs):
            raise ReadsNumbers(f"{func} in a step that is recorded")
        if func._schema.is_mutable:
            self._add(partial(func, *args, **kwargs))
            return args[0]
        made = func(*args, **kwargs)
        given = {_place(one) for one in _tensors((args, *kwargs.values()))}
        if any(_place(one) not in given for one in _tensors((made,))):
            self._add(partial(_again_one if isinstance(made, Tensor) else _again, made, func, *args, **kwargs))
        return made


def asks_for_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op needs numbers on the host, even if only for the shape of its result."""
    if func in _REPEATS:
        return kwargs.get("output_size") is None
    return func in _READS or (func in _INDEXED and any(_is_mask(one) for one in args[1]))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, and in lists of them; torch's pytree takes several times as long."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again_one(made: Tensor, func: Any, *args: Any, **kwargs: Any) -> None:
    made.copy_(func(*args, **kwargs))


def _again(made: Any, func: Any, *args: Any, **kwargs: Any) -> None:
    for then, now in zip(made, func(*args, **kwargs), strict=True):
        then.copy_(now)
