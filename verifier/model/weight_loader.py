"""Where the tensors of a checkpoint go, including those of quantised matrices: what each must be, and how it is read.

A matrix of the decoder is one float tensor in the files, or several: see :mod:`foresay.verifier.model.quantization` for
the layouts. Each is unpacked directly into its rows of the (fused) matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foresay.verifier.model.checkpoint import E4M3, FLOATS
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import ConfigError
from foresay.verifier.model.linear import Matrix
from foresay.verifier.model.products import Stacked
from foresay.verifier.model.quantization import Format, Scheme
from foresay.verifier.ops.quantized import E8M0, FP8, QuantizedMatrix

#: Four-bit numbers in a word, and the order of outputs in an AWQ word.
_EIGHT, _AWQ_ORDER = 8, (0, 4, 1, 5, 2, 6, 3, 7)


class Mismatch(ValueError):
    """The numbers of a tensor are not supported."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor in the files. kinds: the types that it may have. put: called with it, or with the matrix for one of
    GGUF; raises :class:`Mismatch`."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    put: Callable[[Any], Tensor | None]


def stored(
    name: str, into: Matrix, scheme: Scheme | None, there: Container[str] = ()
) -> Iterator[tuple[str, TensorSlot]]:
    """The tensors, by name, that make up one matrix of the decoder. name: that of a float tensor. there: names in the
    files."""
    if isinstance(into, Tensor) or scheme is None or scheme.layout in (Format.MADE, Format.GGUF):
        yield name, TensorSlot(tuple(into.shape), FLOATS, partial(put, into))
        return
    module = name.removesuffix(".weight")
    for part, found in _READERS[scheme.layout](into, scheme):
        other = part.removesuffix("_inv")  # two writers, two names
        yield f"{module}.{other if f'{module}.{other}' in there else part}", found
    if into.order is not None:
        order = "g_idx" if scheme.layout in (Format.GPTQ, Format.GPTQ_V2) else "weight_g_idx"
        yield f"{module}.{order}", TensorSlot((into.inner,), ("I32", "I64"), partial(_put_order, into, into.order))


def put(into: Matrix, found: Matrix) -> Tensor | None:
    """Copy a file's matrix: it is quantised if only ``into`` is quantised, dequantised if only ``into`` is float."""
    if isinstance(into, Tensor):
        return into.copy_(found if isinstance(found, Tensor) else found.plain())
    if isinstance(found, Tensor):
        into.fill(found)
    else:
        _check_scales(found.scales)
        into.take(found)
    return None


def _check_scales(scales: Tensor) -> None:
    if scales.dtype is FP8 and (scales.view(torch.uint8) & 127 == 127).any():
        raise Mismatch("has scales that are NaN (bytes 0x7f or 0xff)")


def stack_slot(how: Stacked, turns: Sequence[Sequence[Matrix]]) -> TensorSlot:
    """A tensor of all experts. turns: for each part (gate, up), the matrices of all experts."""
    kinds: tuple[str, ...] = FLOATS
    if how.holds in ("blocks", "scales"):
        turns, kinds = [[_part(how, one) for one in turn] for turn in turns], ("U8",)
    outer, inner = sum(int(turn[0].shape[0]) for turn in turns), turns[0][0].shape[1:]
    shape = (*inner, outer) if how.transposed else (outer, *inner)
    shape = (len(turns[0]), *shape) if how.among is None else (len(turns[0]) * how.among[2], *shape[1:])
    return TensorSlot(shape, kinds, lambda found: _put_stack(how, turns, of_product(how, found)))


def stack_slots(
    stacks: Sequence[tuple[str, Stacked, Sequence[Sequence[Matrix]], Any]], config: ModelConfig, there: Container[str]
) -> dict[str, TensorSlot]:
    """The tensors of :func:`foresay.verifier.model.weights.stacked`. One of several products may be in few bits."""
    slots = dict[str, list[TensorSlot]]()
    for name, how, turns, _ in stacks:
        slots.setdefault(name, []).append(stack_slot(how, turns))
    found = {name: replace(each[0], put=partial(_put_each, each)) for name, each in slots.items()}
    for name in {name for name, how, *_ in stacks if how.among is not None}:
        found |= _dequantised(found.pop(name), name, config, there)
    return found


def _put_each(slots: Sequence[TensorSlot], found: Matrix) -> Tensor | None:
    return next((kept for kept in [slot.put(found) for slot in slots] if kept is not None), None)


def _dequantised(slot: TensorSlot, name: str, config: ModelConfig, there: Container[str]) -> dict[str, TensorSlot]:
    """The tensors, by name, of a matrix that may be in few bits, but is put as floats."""
    module = name.removesuffix(".weight")
    rooms = WeightAllocator(config, torch.float32, torch.float32, torch.device("cpu"))
    scheme, whole = rooms.scheme((module,), slot.shape[1]), rooms.matrix(slot.shape[0], slot.shape[1], module)
    if isinstance(whole, Tensor) or scheme is None or scheme.layout in (Format.MADE, Format.GGUF):
        return {name: slot}
    parts = dict(stored(name, whole, scheme, there))
    left = set(parts)

    def put_part(part: str, found: Tensor) -> Tensor | None:
        parts[part].put(found)
        left.discard(part)
        return None if left else slot.put(whole.plain())

    return {part: replace(one, put=partial(put_part, part)) for part, one in parts.items()}


def of_product(how: Stacked, found: Matrix) -> Matrix:
    """The part of a tensor of several products that is this one's: [E, rows, K]."""
    if how.among is None:
        return found
    first, end, every = how.among
    whole = found if isinstance(found, Tensor) else found.plain()
    part: Tensor = whole.unflatten(0, (-1, every))[:, first:end]
    return part


def _part(how: Stacked, one: Matrix) -> Tensor:
    """For e2m1 the codes, uint8[O, K / 32, 16], or the scales, uint8[O, K / 32]."""
    assert isinstance(one, QuantizedMatrix), "floats have neither"
    return one.values.unflatten(1, (-1, 16)) if how.holds == "blocks" else one.scales.view(torch.uint8)


def _put_stack(how: Stacked, turns: Sequence[Sequence[Matrix]], found: Matrix) -> Tensor | None:
    sizes = [int(turn[0].shape[0]) for turn in turns]
    parts: Sequence[Matrix]
    if isinstance(found, Tensor):
        parts = [part for one in found.unbind() for part in turns_of_stack(how, one, sizes)]
    else:
        parts = found.split_with_sizes(sizes * len(turns[0]))
    destinations = (into for of_expert in zip(*turns, strict=True) for into in of_expert)
    kept = [put(into, part) for into, part in zip(destinations, parts, strict=True)]
    narrow = (one for one in kept if one is not None and one.dtype is torch.float16)
    return next((one for one in narrow if not one.isfinite().all()), None)


def turns_of_stack(how: Stacked, one: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """An expert's rows, part by part."""
    rows = one.T if how.transposed else one
    return rows.unflatten(0, (-1, len(sizes))).unbind(1) if how.interleaved else rows.split_with_sizes(list(sizes))


_Parts = Iterator[tuple[str, TensorSlot]]


def _packed(into: QuantizedMatrix, scheme: Scheme) -> _Parts:
    (outer, inner), bits = into.shape, scheme.bits
    in_word = 32 // bits
    width = -(-inner // in_word)
    yield "weight_packed", TensorSlot((outer, width), ("I32",), lambda t: into.put(_numbers(t, bits)[:, :inner]))
    yield "weight_scale", _spread(into.scales, scheme)
    yield "weight_shape", TensorSlot((2,), ("I64", "I32"), partial(_check_shape, into.shape))
    if into.zeros is not None:
        zeros, groups = into.zeros, into.zeros.shape[1]
        shape = (-(-outer // in_word), groups)
        yield "weight_zero_point", TensorSlot(shape, ("I32",), lambda t: zeros.copy_(_numbers(t.T, bits).T[:outer]))


def _e2m1(into: QuantizedMatrix, scheme: Scheme) -> _Parts:
    """Codes, scales of 8 bits, and perhaps what all of these are multiplied with, or divided by. gpt-oss has them only
    for all experts together (:func:`stack_slot`)."""
    outer, inner = into.shape
    theirs = scheme.layout == Format.MODELOPT
    yield "weight" if theirs else "weight_packed", TensorSlot((outer, inner // 2), ("U8",), into.values.copy_)
    kind = "U8" if into.steps is None else E4M3
    yield "weight_scale", TensorSlot(tuple(into.scales.shape), (kind,), partial(_put_scales, into.scales))
    if into.steps is not None:
        name = "weight_scale_2" if theirs else "weight_global_scale"
        yield name, TensorSlot((1,), ("F32",), partial(_put_step, into.steps, not theirs))


def _put_scales(scales: Tensor, found: Tensor) -> None:
    _check_scales(found)
    scales.copy_(found.view(scales.dtype))


#: The largest number of e2m1 times the largest scale of e4m3.
_LARGEST = 6.0 * 448.0


def _put_step(steps: Tensor, divides: bool, found: Tensor) -> None:
    if not found.isfinite().all() or not (found > 0).all():
        raise Mismatch(f"is {found.item()}, which is not a positive number")
    step = 1 / found if divides else found
    if not (_LARGEST * step).isfinite().all():
        raise Mismatch(f"is {found.item()}, with which weights may be infinite")
    steps.copy_(step)


def _check_shape(expected: tuple[int, int], found: Tensor) -> None:
    if tuple(found.tolist()) != expected:
        raise Mismatch(f"says {found.tolist()}, expected {list(expected)}")


def _eight_bits(into: QuantizedMatrix, scheme: Scheme) -> _Parts:
    kind, put_numbers = (E4M3, partial(_put_floats, into)) if scheme.floats else ("I8", into.put)
    yield "weight", TensorSlot(into.shape, (kind,), put_numbers)
    yield "weight_scale_inv" if scheme.layout == Format.BLOCKS else "weight_scale", _spread(into.scales, scheme)
    if into.zeros is not None:
        yield "weight_zero_point", TensorSlot(tuple(into.zeros.shape), ("I8",), into.zeros.copy_)


def _spread(scales: Tensor, scheme: Scheme) -> TensorSlot:
    """Scales of one row each, of several rows, or of all of them."""
    outer, groups = scales.shape
    rows = scheme.rows or outer
    shape = (-(-outer // rows), groups) if scheme.rows else (1,)
    return TensorSlot(shape, FLOATS, lambda t: scales.copy_(t.view(-1, groups).repeat_interleave(rows, 0)[:outer]))


def _put_floats(into: QuantizedMatrix, found: Tensor) -> None:
    if (found.view(torch.uint8) & 127 == 127).any():
        raise Mismatch("has numbers that are NaN")
    into.put(found)


def _in_words(into: QuantizedMatrix, scheme: Scheme) -> _Parts:
    """GPTQ's and AWQ's, whose words hold numbers of neighbouring inputs, and of permuted outputs."""
    (outer, inner), groups, is_awq = into.shape, into.scales.shape[1], scheme.layout == Format.AWQ

    def zeros(words: Tensor) -> Tensor:
        """int8[O, G]; GPTQ's first version stored them less one, without a carry."""
        found = _numbers(words, 4)
        found = _in_order(found) if is_awq else found
        return ((found + 9) % 16 - 8 if scheme.layout == Format.GPTQ else found).T

    if is_awq:
        yield "qweight", TensorSlot((inner, outer // _EIGHT), ("I32",), lambda t: into.put(_in_order(_numbers(t, 4)).T))
    else:
        yield "qweight", TensorSlot((inner // _EIGHT, outer), ("I32",), lambda t: into.put(_numbers(t.T, 4)))
    yield "qzeros", TensorSlot((groups, outer // _EIGHT), ("I32",), lambda t: _put_zeros(into, zeros(t)))
    yield "scales", TensorSlot((groups, outer), FLOATS, lambda t: into.scales.copy_(t.T))
    if into.order is None and not is_awq:
        yield "g_idx", TensorSlot((inner,), ("I32",), partial(_check_order, into.group))


def _check_order(group: int, found: Tensor) -> None:
    if not torch.equal(found, (torch.arange(len(found)) // group).to(found.dtype)):
        raise Mismatch(
            "has its groups in a different order than the numbers, although config.json does not say so (desc_act)"
        )


def _put_order(into: QuantizedMatrix, order: Tensor, found: Tensor) -> None:
    """order: of all fused matrices, -1 until one of them has been read."""
    groups, found = into.inner // into.group, found.to(order)
    if found.min() < 0 or not (found.bincount(minlength=groups) == into.group).all():
        raise Mismatch(f"does not give each of {groups} groups {into.group} numbers")
    if order[0] >= 0 and not torch.equal(order, found):
        raise Mismatch("has a different order of groups than the matrices it is multiplied with (q, k, v; gate, up)")
    order.copy_(found)


def _in_order(numbers: Tensor) -> Tensor:
    words: Tensor = numbers.unflatten(1, (-1, _EIGHT))
    return words[:, :, list(_AWQ_ORDER)].flatten(1)


def _put_zeros(into: QuantizedMatrix, zeros: Tensor) -> None:
    """zeros: int8[O, G]."""
    if into.zeros is not None:
        into.zeros.copy_(zeros)
    elif zeros.any():
        raise Mismatch("has zero points other than the middle, although config.json calls the weights symmetric")


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int8[R, N]: the unsigned numbers in words, the first in the lowest bits."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(1)
    return (parts.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


_READERS: dict[Format, Callable[[QuantizedMatrix, Scheme], _Parts]] = {
    Format.PACKED: _packed,
    **dict.fromkeys((Format.INTEGERS, Format.FLOATS8, Format.BLOCKS), _eight_bits),
    **dict.fromkeys((Format.GPTQ, Format.GPTQ_V2, Format.AWQ), _in_words),
    **dict.fromkeys((Format.MXFP4, Format.MXFP4_PACKED, Format.NVFP4_PACKED, Format.MODELOPT), _e2m1),
}


@dataclass(frozen=True, slots=True)
class WeightAllocator:
    """Makes uninitialised tensors. matrices: the dtype of float matrices."""

    config: ModelConfig
    dtype: torch.dtype
    matrices: torch.dtype
    device: torch.device

    def vector(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        """A float vector. wide: fp32, whatever the compute dtype."""
        return torch.empty(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def matrix(self, outer: int, inner: int, *modules: str) -> Matrix:
        """The stacked matrix of these modules: float or quantised."""
        scheme = self.scheme(modules, inner)
        if scheme is None:
            return torch.empty(outer, inner, dtype=self.matrices, device=self.device)
        scales = {Format.MADE: torch.bfloat16, Format.GGUF: torch.float16}.get(scheme.layout, torch.float32)
        if scheme.e2m1:
            scales = FP8 if scheme.group == 16 else E8M0
        group = scheme.group or inner
        kind = scheme.bits, group, scheme.symmetric, scales, self.device, scheme.floats
        empty = QuantizedMatrix.empty(outer, inner, *kind)
        if scheme.span is not None:
            return empty.with_steps(scheme.span, scheme.minimums)
        return empty.with_order() if scheme.ordered else empty

    def scheme(self, modules: Sequence[str], inner: int) -> Scheme | None:
        """How these modules are quantised. Raises ConfigError if they differ, since they are fused."""
        if self.config.quantization is None:
            return None
        first = self.config.quantization.scheme(modules[0], inner)
        for module in modules[1:]:
            if (found := self.config.quantization.scheme(module, inner)) != first:
                both = f"{modules[0]}: {first or 'floats'}, {module}: {found or 'floats'}"
                raise ConfigError(f"modules that are multiplied as one must be quantised alike, not {both}")
        return first
