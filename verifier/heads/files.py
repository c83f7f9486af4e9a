"""The tensors of a head's directory, whatever its author saved them as.

Safetensors where there are any, in one file or several; else a PyTorch pickle, read with ``weights_only`` so that
nothing in it can run. Heads are small: a directory's tensors are read whole and checked by the caller.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from verifier.model.checkpoint import INDEX, SINGLE
from verifier.model.errors import WeightsError
from verifier.model.fields import Fields

#: Weight files by name, the preferred one first.
NAMES = (
    "medusa_lm_head.safetensors",
    SINGLE,
    INDEX,
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """All tensors of a head by name, and where they come from, for messages."""

    tensors: dict[str, Tensor]
    where: str

    @classmethod
    def read(cls, directory: Path) -> HeadTensors:
        """Raises WeightsError, naming the file, where none is there or one is broken."""
        for name in NAMES:
            path = directory / name
            if path.exists():
                return cls(_sharded(path) if path.suffix == ".json" else _tensors(path), str(path))
        raise WeightsError(f"{directory}: no weights of a head are there; looked for {', '.join(NAMES)}")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name and shape; raises WeightsError if it is absent or shaped otherwise."""
        tensor = self.optional(name, shape)
        if tensor is None:
            raise WeightsError(f"{self.where}: {name} is missing")
        return tensor

    def optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The same, None where absent."""
        tensor = self.tensors.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise WeightsError(f"{self.where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def check_known(self, known: set[str]) -> None:
        """Raise WeightsError for a tensor that nobody asked for: the head computes something else then."""
        unknown = sorted(set(self.tensors) - known)
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise WeightsError(f"{self.where}: {', '.join(unknown[:3])}{more}: not known in this layout")


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError or RuntimeError, and leaves what it had written, if it cannot."""
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def _sharded(index: Path) -> dict[str, Tensor]:
    section = Fields.read(index).section("weight_map")
    names = sorted({str(name) for name in section.values.values()}) if section is not None else []
    if not names:
        raise WeightsError(f"{index}: weight_map must name a file for each tensor")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= _tensors(index.parent / name)
    return tensors


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: not there; the download may be incomplete") from error
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error})") from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path}: not a whole file of tensors alone ({reason})") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise WeightsError(f"{path}: holds other things than tensors by name")
    return found
