"""The tensors of a directory made of a GGUF file, by the names that they have here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.gguf.blocks import matrix_of
from foresay.verifier.model.gguf.file import GgufFile
from foresay.verifier.model.gguf.names import CONFIGURATION, gguf_of, ours, theirs
from foresay.verifier.model.linear import Matrix


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """Reads them one by one, as safetensors' own reader does. part: of the file. data: that, mapped, uint8[..]."""

    file: GgufFile
    part: Path
    data: Tensor

    @classmethod
    def open(cls, file: GgufFile, part: Path) -> Self:
        """Map a part."""
        data = torch.from_file(str(part), shared=False, size=part.stat().st_size, dtype=torch.uint8)
        return cls(file, part, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def offset_keys(self) -> list[str]:
        """Names, in the order of the part."""
        own = {name: one.start for name, one in self.file.tensors.items() if one.path == self.part}
        return [
            ours(name, self.file.architecture) for name in sorted(own, key=own.__getitem__) if name not in CONFIGURATION
        ]

    def get_tensor(self, name: str) -> Matrix:
        """The tensor of this name, its rows in the order that they have here."""
        tensor = self.file.tensors[theirs(name, self.file.architecture)]
        raw = self.data[tensor.start : tensor.start + tensor.nbytes]
        if raw.data_ptr() % 4:
            raw = raw.clone()
        found = matrix_of(raw, tensor.shape, tensor.type)
        heads = self._heads(theirs(name, self.file.architecture))
        return found if heads is None else found[_halves(len_of(found), heads)]

    def _heads(self, name: str) -> int | None:
        """How many heads' rows a tensor has that lie in pairs, as Llama's files have them; None for others."""
        architecture = self.file.architecture
        if not gguf_of(architecture).in_pairs or not name.startswith("blk."):
            return None
        part = name.split(".")[2]
        if part not in ("attn_q", "attn_k"):
            return None
        queries = self.file.metadata[f"{architecture}.attention.head_count"]
        key = f"{architecture}.attention.head_count_kv"
        found = queries if part == "attn_q" else self.file.metadata.get(key, queries)
        return int(found[0] if isinstance(found, list) else found)


def len_of(matrix: Matrix) -> int:
    """Its rows."""
    return int(matrix.shape[0])


def _halves(rows: int, heads: int) -> Tensor:
    """int64[rows]: which row there is each row here. Numbers that rotate together are neighbours there, and half a
    head apart here."""
    if rows % (2 * heads):
        raise WeightsError(f"{rows} rows cannot be split into {heads} heads")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
