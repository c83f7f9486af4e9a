"""The tensors of a directory made from a GGUF file, by their names here.

The file's blocks become matrices of integers: nothing is rounded. A block is a row's next 32 or 256 numbers with their
scales. In one of 256, groups of 32 or 16 have scales (and minimums) of six or eight bits, which are multiples of two
fp16 steps of the block.

::

    Q8_0   scale, 32 numbers
    Q4_0   scale, 32 numbers, offset by 8: byte i holds i and, in the upper half, 16 + i
    Q4_1   scale, addend, 32 numbers from 0
    Q5_0   scale, the fifth bits of all numbers, the other four; numbers offset by 16
    Q5_1   scale, addend, then the same; numbers from 0
    Q4_K   steps of scales and of minimums, 8 scales and minimums in six bits, numbers from 0
    Q5_K   the same, with the fifth bits of all numbers before the other four
    MXFP4  an exponent, 32 codes of e2m1 in the order of Q4_0's numbers
    NVFP4  four scales of e4m3, 64 codes of e2m1: 16 by 16 in that order
    Q6_K   numbers offset by 32: four lower bits, two upper bits; 16 scales; their step

Legend: O rows, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.gguf.config import CONFIGURATION, gguf_of, ours, shape_of, theirs
from foresay.verifier.model.gguf.file import BF16, F16, F32, GgufFile, Type
from foresay.verifier.model.linear import Matrix
from foresay.verifier.model.safetensors_file import bytes_of
from foresay.verifier.ops.quantized import E8M0, FP8, QuantizedMatrix

_FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
#: Rows that are converted at a time, so that intermediate results take little memory.
_ROWS = 1024


class _Parts(NamedTuple):
    """The contents of blocks. numbers: int8[O, K], or four-bit ones packed as in a matrix, uint8[O, K / 2]. scales:
    fp16[O, K / 32], or int8[O, G] with steps, or 8-bit ones with e2m1 codes. minimums: int8[O, G]. steps,
    minimum_steps: fp16[O, N]."""

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None


def matrix_of(raw: Tensor, shape: tuple[int, ...], kind: Type) -> Matrix:
    """A tensor of the file. raw: its bytes, uint8[..]."""
    if kind.scheme is None:
        return raw.view(_FLOATS[kind]).view(shape)
    rows = raw.view(-1, shape[-1] // kind.numbers, kind.size)
    made = list[QuantizedMatrix]()
    for some in rows.split(_ROWS):
        numbers, scales, *more = _READERS[kind.name](some)
        made.append(QuantizedMatrix(numbers, scales.contiguous(), None, kind.scheme.bits, shape[-1], *more))
    return made[0] if len(made) == 1 else QuantizedMatrix.stacked(made)


def _half(blocks: Tensor, start: int) -> Tensor:
    """fp16[O, N]: the fp16 number at this byte of each block."""
    half: Tensor = blocks[:, :, start : start + 2].contiguous().view(torch.float16).squeeze(2)
    return half


def _with_fifth(blocks: Tensor, start: int) -> Tensor:
    """uint8[O, N, 32]: five-bit numbers. start: of their fifth bits."""
    bits = torch.stack([(blocks[:, :, start : start + 4] >> bit) & 1 for bit in range(8)], dim=3).flatten(2)
    return _nibbles(blocks[:, :, start + 4 :], 16) | bits << 4


def _with_addend(blocks: Tensor, numbers: Tensor) -> _Parts:
    """The addend is a negated minimum, with a multiple of one."""
    steps = _half(blocks, 0), -_half(blocks, 2)
    ones = torch.ones(steps[0].shape, dtype=torch.int8)
    return _Parts(numbers, ones, ones, *steps)


def _nibbles(data: Tensor, width: int) -> Tensor:
    """uint8[O, N, 2 B] from [O, N, B]: the lower halves of ``width`` bytes, then their upper halves, and so on."""
    runs = data.unflatten(2, (-1, width))
    return torch.stack((runs & 15, runs >> 4), dim=3).flatten(2)


def _in_pairs(data: Tensor, width: int) -> Tensor:
    """uint8[O, N B]: the same numbers, two neighbours in a byte as in :func:`foresay.verifier.ops.quantized.packed`,
    without unpacking to a byte each."""
    twos = data.contiguous().view(torch.int16)
    halves = twos & 0x0F0F, (twos >> 4) & 0x0F0F
    pairs = torch.stack([half.unflatten(2, (-1, width // 2)) for half in halves], dim=3)
    pairs |= pairs >> 4
    return pairs.to(torch.uint8).flatten(1)


def _six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """int8[O, N, 8] twice: scales and minimums of [O, N, 12]. The upper bits of the last four of each are above the six
    bits of the first four."""
    scales, minimums, rest = data.split(4, dim=2)
    first = torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), dim=2)
    second = torch.cat((minimums & 63, (rest >> 4) | ((minimums >> 2) & 48)), dim=2)
    return first.view(torch.int8), second.view(torch.int8)


def _with_minimums(blocks: Tensor, numbers: Tensor) -> _Parts:
    scales, minimums = _six_bits(blocks[:, :, 4:16])
    steps = _half(blocks, 0), _half(blocks, 2)
    return _Parts(numbers, scales.flatten(1), minimums.flatten(1), *steps)


def _q5_k(blocks: Tensor) -> _Parts:
    lower, upper = _nibbles(blocks[:, :, 48:], 32), blocks[:, :, 16:48]
    fifth = torch.stack([(upper >> bit) & 1 for bit in range(8)], dim=2).flatten(2)
    return _with_minimums(blocks, (lower | fifth << 4).flatten(1).view(torch.int8))


def _q6_k(blocks: Tensor) -> _Parts:
    lower, upper = _nibbles(blocks[:, :, :128], 64), blocks[:, :, 128:192].unflatten(2, (2, 32))
    high = torch.stack([(upper >> bit) & 3 for bit in range(0, 8, 2)], dim=3).flatten(2)
    numbers = (lower | high << 4).view(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return _Parts(numbers.flatten(1), scales.flatten(1), steps=_half(blocks, 208))


#: What reads blocks, uint8[O, N, ..], by their types.
_READERS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": lambda blocks: _Parts(blocks[:, :, 2:].flatten(1).view(torch.int8), _half(blocks, 0)),
    "Q4_0": lambda blocks: _Parts(_in_pairs(blocks[:, :, 2:], 16) ^ 0x88, _half(blocks, 0)),  # 8 less
    "Q4_1": lambda blocks: _with_addend(blocks, _in_pairs(blocks[:, :, 4:], 16)),
    "Q5_0": lambda blocks: _Parts((_with_fifth(blocks, 2).view(torch.int8) - 16).flatten(1), _half(blocks, 0)),
    "Q5_1": lambda blocks: _with_addend(blocks, _with_fifth(blocks, 4).flatten(1).view(torch.int8)),
    "Q4_K": lambda blocks: _with_minimums(blocks, _in_pairs(blocks[:, :, 16:], 32)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": lambda blocks: _Parts(_in_pairs(blocks[:, :, 1:], 16), blocks[:, :, 0].contiguous().view(E8M0)),
    "NVFP4": lambda blocks: _Parts(_in_pairs(blocks[:, :, 4:], 8), blocks[:, :, :4].flatten(1).view(FP8)),
}


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """Reads tensors one by one, with the interface of safetensors' reader. part: of the file. data: its mapping,
    uint8[..]."""

    file: GgufFile
    part: Path
    data: Tensor

    @classmethod
    def open(cls, file: GgufFile, part: Path) -> Self:
        """Map a part."""
        return cls(file, part, bytes_of(part))

    def offset_keys(self) -> list[str]:
        """Names, in the order of the part."""
        own = {name: one.start for name, one in self.file.tensors.items() if one.path == self.part}
        return [ours(name, self.file) for name in sorted(own, key=own.__getitem__) if name not in CONFIGURATION]

    def get_tensor(self, name: str) -> Matrix:
        """The tensor with this name, its rows in the order used here."""
        there = theirs(name, self.file)
        tensor = self.file.tensors[there]
        raw = self.data[tensor.start : tensor.start + tensor.nbytes]
        if raw.data_ptr() % 4:
            raw = raw.clone()
        found, heads = matrix_of(raw, shape_of(name, tensor), tensor.type), self._heads(there)
        return found if heads is None else found[_halves(int(found.shape[0]), heads)]

    def _heads(self, name: str) -> int | None:
        """The number of heads of a tensor with adjacent rotary pairs, as in Llama's files; None for others."""
        architecture = self.file.architecture
        if not gguf_of(architecture).in_pairs or not name.startswith("blk."):
            return None
        part = name.split(".")[2]
        if part not in ("attn_q", "attn_k"):
            return None
        queries = self.file.metadata[f"{architecture}.attention.head_count"]
        key = f"{architecture}.attention.head_count_kv"
        found = queries if part == "attn_q" else self.file.metadata.get(key, queries)
        return int(max(found) if isinstance(found, list) else found)


def _halves(rows: int, heads: int) -> Tensor:
    """int64[rows]: the row in the file for each row here. Numbers that rotate together are adjacent there, and half a
    head apart here."""
    if rows % (2 * heads):
        raise WeightsError(f"{rows} rows cannot be split into {heads} heads")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
