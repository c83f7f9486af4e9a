"""The tensors of a head's directory, whatever its author saved them as.

Safetensors where there are any, in one file or several; else a PyTorch pickle, read with ``weights_only`` so that
nothing in it can run. Heads are small: a directory's tensors are read whole and checked by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foresay.verifier.model.checkpoint import INDEX, SINGLE
from foresay.verifier.model.errors import ConfigError, WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.written import write_int8

_PICKLES = "pytorch_model.bin.index"
#: Weight files by name, the preferred one first.
NAMES = ("medusa_lm_head.safetensors", SINGLE, INDEX, "medusa_lm_head.pt", "pytorch_model.bin", f"{_PICKLES}.json")


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """All tensors of a head by name, and where they come from, for messages."""

    tensors: dict[str, Tensor]
    where: str

    @classmethod
    def read(cls, directory: Path, prefix: str = "") -> HeadTensors:
        """Raises WeightsError, naming the file, where none is there or one is broken.

        prefix: if any name begins so, the others (a whole model's) are left where they are.
        """
        path = next((directory / name for name in NAMES if (directory / name).exists()), None)
        if path is None:
            raise WeightsError(f"{directory}: there are no weights of a head; looked for {', '.join(NAMES)}")
        tensors = _sharded(path, prefix) if path.suffix == ".json" else _tensors(path, prefix)
        return cls({name: tensors[name] for name in _inside(tensors, prefix)}, str(path))


def quantize(directory: Path, out: Path) -> None:
    """Write a head of floats with its matrices in int8. Raises WeightsError if its files are broken, or it is so
    already."""
    head = HeadTensors.read(directory)
    if any(name.endswith("_scale") for name in head.tensors):
        raise WeightsError(f"{head.where}: is quantised already")
    write_int8(head.tensors, Fields.read(directory / "config.json").values, out)


def stored_names(directory: Path) -> list[str]:
    """The tensors' names, from headers alone; empty for a pickle, or for a broken file, which its loader will name."""
    try:
        if (directory / SINGLE).exists():
            with safe_open(directory / SINGLE, framework="pt") as stored:
                return list(stored.offset_keys())
        return list(_index(directory / INDEX))
    except (OSError, SafetensorError, ConfigError):
        return []


def _index(path: Path) -> dict[str, str]:
    section = Fields.read(path).section("weight_map")
    return {} if section is None else {str(name): str(file) for name, file in section.values.items()}


def _inside(names: Iterable[str], prefix: str) -> list[str]:
    """Those that begin with the prefix; all if there are none."""
    known = list(names)
    return [name for name in known if name.startswith(prefix)] or known


def _sharded(index: Path, prefix: str) -> dict[str, Tensor]:
    files = _index(index)
    if not files:
        raise WeightsError(f"{index}: weight_map must name a file for each tensor")
    parts = (_tensors(index.parent / file, prefix) for file in sorted({files[name] for name in _inside(files, prefix)}))
    return {name: tensor for part in parts for name, tensor in part.items()}


def _tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    try:
        if path.suffix != ".safetensors":
            return _unpickled(path)
        with safe_open(path, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in _inside(stored.offset_keys(), prefix)}
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: not there; the download may be incomplete") from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: not a complete safetensors file ({error})") from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on a damaged file the reader may fail in any way
        raise WeightsError(
            f"{path}: not a complete file of tensors only: it is cut off or damaged, or holds code, which is never run"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise WeightsError(f"{path}: holds something other than named tensors")
    return {str(name): tensor for name, tensor in found.items()}
