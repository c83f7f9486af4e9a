"""The tensors of a safetensors file, from a mapping of it that may be larger than the memory.

safetensors' own reader for torch asks for memory as large as the file, which a system may refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from foresay.verifier.model.errors import WeightsError
from foresay.verifier.ops.kernels.cpu import huge_pages

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def bytes_of(path: Path) -> Tensor:
    """uint8[..]: a file, mapped. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return torch.frombuffer(huge_pages.mapped(file.fileno()), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Reads tensors one by one. entries: of the header, by name. begin: where the data of all of them does."""

    path: Path
    entries: Mapping[str, Any]
    data: Tensor
    begin: int

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file. Raises OSError or SafetensorError if it is not a whole one."""
        with safe_open(path, framework="np"):  # checks its header
            data = bytes_of(path)
        begin = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
        entries = json.loads(data[8:begin].numpy().tobytes())
        entries.pop("__metadata__", None)
        return cls(path, entries, data, begin)

    def offset_keys(self) -> list[str]:
        """Names, in the order of the file."""
        return sorted(self.entries, key=lambda name: self.entries[name]["data_offsets"])

    def get_tensor(self, name: str) -> Tensor:
        """The tensor with this name. Raises WeightsError if torch has no such type."""
        entry = self.entries[name]
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise WeightsError(f"{self.path}: {name} has type {entry['dtype']}, which is not supported")
        first, last = entry["data_offsets"]
        raw = self.data[self.begin + first : self.begin + last]
        return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype).view(entry["shape"])
