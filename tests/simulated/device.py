"""A device that is not the CPU, for machines that have no other: it computes on the CPU, and is as strict as a GPU.

Its tensors say that they are on device ``meta`` and hold their values in a tensor of the CPU. What a GPU would refuse
is refused: ops that mix its tensors with the CPU's, NumPy. While a step is *captured*, what a graph cannot hold is
refused too: values that go to the host or come from it. A copy from pinned memory that does not block may read it until
the host has waited for it, so that memory may not change before.

The ops of ``verifier/ops``, kernels on a GPU, are run on the values by their torch references (:func:`kernels`).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foresay.verifier.ops import experts
from foresay.verifier.ops.eager import Op, references
from foresay.verifier.ops.kernels.cpu.torch_ops import asks_for_numbers
from tests.kernels.binder import on_gpu

DEVICE = torch.device("meta")
_ATEN = torch.ops.aten
#: A GPU takes indices from the CPU too, by copying them first.
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
#: Where ops are named.
_OURS = ("foresay", "bench", "tests")
Named = TypeVar("Named")


class NotOnTheDevice(RuntimeError):
    """Something a GPU would refuse."""


class Simulated(Tensor):
    """A tensor of the simulated device. held: what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Simulated:
        made = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            dtype=values.dtype,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            device=DEVICE,
        )
        made.held = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        """Through the host, as on a GPU."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise NotOnTheDevice("NumPy cannot read this device: bring the tensor to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return CURRENT.run(func, args, kwargs or {})


class Event:
    """``torch.Event`` of the device: done when the host has waited, be it for a later one or for values."""

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE, device
        self._sent = 0

    def record(self) -> None:
        self._sent = CURRENT.sent

    def synchronize(self) -> None:
        CURRENT.arrive(self._sent)


class Machine(TorchDispatchMode):
    """The simulated device while it is in use.

    binding: what launches went through Triton's binder too (:mod:`tests.kernels.binder`); None: none does.
    captured: while a step is captured, each launch and what it is given, in order. reads: how often values were
    brought to the host. launched: how often each op was launched by the host, and graphs were. sent: how many copies
    from pinned memory were begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[tuple[str, tuple[Any, ...]]] | None = None
        self.reads = 0
        self.launched: Counter[str] = Counter()
        self.binding: set[Any] | None = None
        self._made: dict[int, Any] = {}  # the memory is kept, so that no other tensor comes to lie there
        self._fresh: list[int] = []
        self._named: list[tuple[int, weakref.ref[Simulated]]] = []
        self.sent = 0
        self._pinned: dict[int, Any] = {}
        self._under_way: list[tuple[int, Tensor, Tensor]] = []  # by number: what is read, and how it was

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, seconds of work, to keep it away from what is not compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One op of torch; those that are made of others (inference mode hands them over whole) as those."""
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        ours = [tensor for tensor in tensors if isinstance(tensor, Simulated)]
        if func is _ATEN._to_copy.default:
            return self._copied(args[0], kwargs)
        if func is _ATEN.copy_.default:
            return self._copied_into(*args)
        if kwargs.pop("pin_memory", None):
            return self._pin(func(*args, **kwargs))
        self._check(
            func, args, ours, [tensor for tensor in tensors if not isinstance(tensor, Simulated) and tensor.dim()]
        )
        requested = kwargs.get("device")
        here = bool(ours) or (requested is not None and torch.device(requested) == DEVICE)
        if asks_for_numbers(func, args, kwargs):
            self._read(str(func), bool(ours))
            here = here and func not in (_ATEN._local_scalar_dense.default, _ATEN.equal.default)
        if here:
            self.note(str(func), (args, kwargs))
        made = func(*_mapped(_values, args), **_mapped(_values, kwargs))
        return _mapped(lambda value: self._result(value, ours), made) if here else made

    def _result(self, value: Any, inputs: list[Simulated]) -> Any:
        if isinstance(value, Tensor) and not _aliases(value, inputs):
            self._make(value)
        return self._name(_wrapped(value, inputs))

    def note(self, name: str, given: Any) -> None:
        """A launch, with all that it is given."""
        if self.captured is None:
            self.launched[name] += 1
        else:
            self.captured.append((name, tuple(map(self._seen, _leaves(given)))))

    def _seen(self, leaf: Any) -> Any:
        """What a graph keeps of it: a number as it is now, one in a tensor of the CPU too; of a tensor shape and dtype,
        and where it lies if it was not made inside the step: a graph reads it from there."""
        if not isinstance(leaf, Tensor):
            return leaf
        if not isinstance(leaf, Simulated) and not leaf.dim():
            return leaf.item()
        address = _values(leaf).untyped_storage().data_ptr()
        return tuple(leaf.shape), leaf.dtype, 0 if address in self._made else address

    def _make(self, value: Tensor) -> None:
        """Remember what captured steps made by themselves: a later one may read what an earlier one left."""
        if self.captured is not None:
            memory = value.untyped_storage()
            self._made[memory.data_ptr()] = memory
            self._fresh.append(memory.data_ptr())

    def _name(self, value: Named) -> Named:
        """Remember who names memory, made in a step or a view of such."""
        if self.captured is not None and isinstance(value, Simulated):
            self._named.append((value.held.untyped_storage().data_ptr(), weakref.ref(value)))
        return value

    def left(self) -> list[tuple[Any, bool]]:
        """The memory that the last step made, in order, and whether anybody still names it."""
        named = {address for address, name in self._named if name() is not None}
        return [(self._made[address], address in named) for address in self._fresh]

    def forget(self) -> None:
        """Free what captured steps made, and pinned memory."""
        self._made.clear()
        self._pinned.clear()
        self._under_way.clear()

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a kernel can read it: on the device, or pinned."""
        return isinstance(tensor, Simulated) or tensor.untyped_storage().data_ptr() in self._pinned

    def _pin(self, made: Tensor) -> Tensor:
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def _send(self, source: Tensor) -> None:
        """Begin to copy from pinned memory."""
        self._unchanged()
        self.sent += 1
        with torch._C._DisableTorchDispatch():
            self._under_way.append((self.sent, source, source.clone()))

    def _unchanged(self) -> None:
        with torch._C._DisableTorchDispatch():
            if not all(torch.equal(source, before) for _, source, before in self._under_way):
                raise NotOnTheDevice("pinned memory was written while a copy from it may have been under way")

    def arrive(self, sent: int) -> None:
        """The host has waited for the first ``sent`` copies."""
        self._unchanged()
        self._under_way = [each for each in self._under_way if each[0] > sent]

    @contextmanager
    def capture(self) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
        """The rules of a capture; yields its launches, complete at the end."""
        self.captured, self._fresh, self._named = [], [], []
        try:
            yield self.captured
        finally:
            self.captured = None

    def _check(self, func: Any, args: Any, ours: list[Simulated], theirs: list[Tensor]) -> None:
        if ours and theirs and not (func in _INDEXED and isinstance(args[0], Simulated)):
            raise NotOnTheDevice(f"{func} mixes tensors of the device with the CPU's")
        if ours and theirs and self.captured is not None:
            raise NotOnTheDevice(f"{func} inside a captured step copies indices from the CPU")

    def _read(self, what: str, ours: bool) -> None:
        if ours and self.captured is not None:
            raise NotOnTheDevice(f"{what} inside a captured step brings values to the host")
        if ours:
            self._wait()

    def _wait(self) -> None:
        """Values are brought to the host, behind all that was launched."""
        self.reads += 1
        self.arrive(self.sent)

    def _copied(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """``to``: from one device to the other, or to another dtype."""
        target = torch.device(kwargs.get("device") or source.device)
        self._moved(isinstance(source, Simulated), target == DEVICE)
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        if target == DEVICE:
            self.note("to", [source])
        made: Tensor = _ATEN._to_copy.default(_values(source), **rest)
        if target != DEVICE:
            return made
        self._make(made)
        return self._name(Simulated(made))

    def _copied_into(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        here = isinstance(target, Simulated)
        if here and non_blocking and source.untyped_storage().data_ptr() in self._pinned:
            self._send(source)
        if source.dim() or isinstance(source, Simulated) or self.captured is not None:
            self._moved(isinstance(source, Simulated), here)
        if here:
            self.note("copy_", [target, source])
        _values(target).copy_(_values(source))
        return target

    def _moved(self, was_here: bool, goes_here: bool) -> None:
        if was_here != goes_here and self.captured is not None:
            raise NotOnTheDevice(f"a captured step copies values {'from' if was_here else 'to'} the device")
        if was_here and not goes_here:
            self._wait()


def _aliases(value: Tensor, inputs: list[Simulated]) -> bool:
    """Whether a result is a view of an input, or the input itself."""
    address = value.untyped_storage().data_ptr()
    return any(tensor.held.untyped_storage().data_ptr() == address for tensor in inputs)


def _values(value: Any) -> Any:
    if isinstance(value, Simulated):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) and value == DEVICE else value


def _wrapped(value: Any, inputs: list[Simulated]) -> Any:
    """A result on the device; the very input where it was changed in place."""
    if not isinstance(value, Tensor) or isinstance(value, Simulated):
        return value
    same = [tensor for tensor in inputs if tensor.held is value]
    return same[0] if same else Simulated(value)


#: Ops that only name memory in another way.
_VIEWS = {
    "view", "slice", "select", "unsqueeze", "expand", "t", "transpose", "split", "alias", "detach", "unfold",
    "_unsafe_view", "split_with_sizes",
}  # fmt: skip


def is_view(launched: str) -> bool:
    """Whether what was launched is an op that only names memory in another way."""
    return not _VIEWS.isdisjoint(launched.split(".")[1:2])


CURRENT = Machine()
#: Only for speed: what has no parts.
_LEAVES = {type(None), Tensor, Simulated, bool, int, float, str, torch.dtype, torch.device, torch.layout}


@contextmanager
def simulated() -> Iterator[Machine]:
    """Use the device: tensors can be made on :data:`DEVICE`, and ops are run as kernels."""
    with torch.inference_mode(), kernels(), _what_asks_no_mode(), CURRENT:
        yield CURRENT
    CURRENT.forget()


@contextmanager
def _what_asks_no_mode() -> Iterator[None]:
    """``torch.tensor(..., device=...)``: made on the CPU and copied. And ``torch.Event``."""
    made, event = torch.tensor, torch.Event

    def tensor(data: Any, *, device: Any = None, **rest: Any) -> Tensor:
        return made(data, **rest) if device is None else made(data, **rest).to(device)

    torch.tensor, torch.Event = tensor, Event  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.tensor, torch.Event = made, event  # type: ignore[misc]


@contextmanager
def kernels() -> Iterator[None]:
    """Every op of ``verifier/ops`` that is a kernel on a GPU is one launch here, and runs on values."""
    ops = [
        value
        for name in [
            name for name in sys.modules if name.startswith("foresay.verifier.ops.") and ".kernels" not in name
        ]
        for value in vars(sys.modules[name]).values()
        if getattr(value, "__module__", "") == name and _is_kernel(value)
    ]
    launched = {id(op): _launched(op) for op in ops}
    replaced: list[tuple[Any, str, Any]] = []
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in _OURS]:
        for name, value in list(vars(module).items()):
            if id(value) in launched:
                replaced.append((module, name, value))
                setattr(module, name, launched[id(value)])
    try:
        yield
    finally:
        for module, name, op in replaced:
            setattr(module, name, op)


@cache
def _is_made_of_others(func: Any) -> bool:
    made: bool = func._can_decompose()
    return made


def _is_kernel(op: Any) -> bool:
    if isinstance(op, Op):
        return op.has_gpu_kernel
    return inspect.isfunction(op) and not op.__name__.startswith("_") and "is_cuda" in _source(op)


_source = cache(inspect.getsource)


def _launched(op: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(op)
    def launch(*args: Any, **kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        if not any(isinstance(tensor, Simulated) for tensor in tensors):
            return op(*args, **kwargs)
        if not all(map(CURRENT.reaches, tensors)):
            raise NotOnTheDevice(f"{op.__name__} is given tensors of the CPU")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise NotOnTheDevice(f"{op.__name__} is given a tensor with gaps: kernels read them as if there were none")
        CURRENT.note(op.__name__, (args, kwargs))
        if CURRENT.binding is not None:
            _bind(op, args, kwargs, CURRENT.binding)
        apart = references() if op.__module__ == experts.__name__ else nullcontext()  # a CPU sorts rows in another way
        with torch._C._DisableTorchDispatch(), apart:
            made = op(*_mapped(_values, args), **_mapped(_values, kwargs))
        ours = [tensor for tensor in tensors if isinstance(tensor, Simulated)]
        return _mapped(lambda value: CURRENT._result(value, ours), made)

    return launch


def _bind(op: Callable[..., Any], args: Any, kwargs: dict[str, Any], bound: set[Any]) -> None:
    """Send a launch through Triton's binder, unless one of the same shapes and numbers has been: it knows no more."""
    what = (op, *map(_known_of, _leaves((args, kwargs))))
    if what not in bound:
        bound.add(what)
        with torch._C._DisableTorchDispatch(), on_gpu():
            op(*_mapped(_blank, args), **_mapped(_blank, kwargs))


def _known_of(leaf: Any) -> Any:
    """All that a launcher without a GPU can tell two of them by."""
    if isinstance(leaf, Simulated):
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype
    return type(leaf), leaf


def _blank(value: Any) -> Any:
    """A tensor's shape alone, as launchers take it that have no GPU."""
    if not isinstance(value, Simulated):
        return value
    address = value.storage_offset()
    behind = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size)
    memory = torch.empty(address + behind + 1, dtype=value.dtype, device=DEVICE)
    return memory.as_strided(value.shape, value.stride(), address)  # begins on 16 bytes where the values do


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor)]


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[Any]) -> None:
    kind: Any = type(tree)
    if kind in _LEAVES:
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            found.append(value) if type(value) in _LEAVES else _gather(value, found)
    elif isinstance(tree, dict):
        for value in tree.values():
            _gather(value, found)
    elif names := _names(kind):
        for name in names:
            _gather(getattr(tree, name), found)
    else:
        found.append(tree)


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a record of ours."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Change every leaf, inside our own records of tensors too. Most of the time of these tests is spent here."""
    kind: Any = type(tree)
    if kind in _LEAVES:
        return change(tree)
    if isinstance(tree, (tuple, list)):
        changed = [change(value) if type(value) in _LEAVES else _mapped(change, value) for value in tree]
        return kind(*changed) if hasattr(tree, "_fields") else kind(changed)
    if isinstance(tree, dict):
        return {name: _mapped(change, value) for name, value in tree.items()}
    if names := _names(kind):
        return kind(**{name: _mapped(change, getattr(tree, name)) for name in names})
    return change(tree)
