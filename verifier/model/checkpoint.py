"""The weight files of a model directory, from their headers: which tensors, where, of what shape and type.

Nothing but headers is read here, so a checkpoint that does not fit its configuration is refused in milliseconds.

A model is identified by its last norm, whatever its files' names and its matrices' bits. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from foresay.verifier.model.errors import ModelError, WeightsError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.config import CONFIGURATION, PREDICTED, PREDICTS, ours, shape_of, theirs
from foresay.verifier.model.gguf.file import LINK, TYPES, GgufFile, parts_of
from foresay.verifier.model.mtp_layout import prefixes
from foresay.verifier.model.names import tensor_name

log = logging.getLogger("foresay.models")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32", "F64")
E4M3 = "F8_E4M3"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, E4M3: 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
#: GGUF's block types: bytes per number, including scales.
BLOCK_BYTES = {one.name: one.size / one.numbers for one in TYPES.values() if one.numbers > 1}
#: Prefixes of the names of tensors for images and sounds, which are not read.
_IMAGES = tuple(
    f"{begin}{name}."
    for begin in ("", "model.")
    for name in ("vision_tower", "multi_modal_projector", "vision_adapter", "vision_projection", "visual",
                 "vision_embedder", "embed_vision", "audio_tower", "embed_audio")
)  # fmt: skip
#: A tensor's shape, and the types that it may have.
Expected = tuple[tuple[int, ...], tuple[str, ...]]
# Buffers of old checkpoints that every decoder computes itself; scales for rounding activations, which are not rounded
# here, and keys and values, which get their own scales.
IGNORED = (".rotary_emb.inv_freq", ".masked_bias", ".input_scale", ".input_zero_point", ".input_global_scale",
           ".activation_scale", ".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale",
           ".v_proj.output_scale")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's entry in a file's header; ``dtype`` is safetensors' name, or GGUF's."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return int(math.prod(self.shape) * {**ITEM_BYTES, **BLOCK_BYTES}[self.dtype])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weight files of a directory, and all their tensors by name.

    index: file name of each tensor in model.safetensors.index.json, empty if a single file holds them all. gguf: the
    file if it is llama.cpp's; then messages use its tensor names.
    """

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    index: Mapping[str, str]
    gguf: GgufFile | None = None

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the headers; raises WeightsError if a file is absent or broken, or a tensor is in two files."""
        if (directory / LINK).is_symlink():
            return cls._of_gguf(directory)
        index = {} if (directory / SINGLE).exists() else _index(directory)
        files = _files(directory, index)
        tensors: dict[str, StoredTensor] = {}
        wrapped = False
        for file in files:
            for name, own, tensor in _header(file):
                if name in tensors:
                    raise WeightsError(f"{name} is in both {tensors[name].file} and {file}")
                tensors[name] = tensor
                wrapped = wrapped or name != own
        if wrapped:  # a model of texts and images
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_IMAGES)}
        drafters = prefixes(tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(drafters)}
        return cls(directory, files, tensors, index)

    @classmethod
    def _of_gguf(cls, directory: Path) -> Checkpoint:
        file = GgufFile.read((directory / LINK).readlink())
        named = ((ours(name, file), each) for name, each in file.tensors.items() if name not in CONFIGURATION)
        tensors = {
            name: StoredTensor(each.path, shape_of(name, each), each.type.name)
            for name, each in named
            if not name.startswith(PREDICTS)
        }
        return cls(directory, file.files, tensors, {}, file)

    def without(self, idle: tuple[str, ...]) -> Checkpoint:
        """The same without tensors whose names begin with one of these, which nothing reads."""
        read = {name: each for name, each in self.tensors.items() if not name.startswith(idle)}
        if left := len(self.tensors) - len(read):
            log.info("%s: %d tensors that nothing reads are left out (%s)", self.directory, left, idle[0])
        return replace(self, tensors=read)

    def opened(self, file: Path) -> Any:
        """A reader of one of the files, which may be larger than the memory, with ``offset_keys()`` and
        ``get_tensor(name)``."""
        if self.gguf is None:
            from foresay.verifier.model.safetensors_file import StoredTensors  # imports torch

            return _Renamed(StoredTensors.open(file))
        from foresay.verifier.model.gguf.weights import GgufTensors  # so does this

        return GgufTensors.open(self.gguf, file)

    def check(self, tensors: Mapping[str, Expected], optional: Mapping[str, Expected]) -> None:
        """Raise WeightsError unless the tensors are those of ``tensors``, possibly ``optional`` ones, and no others."""
        missing = (self._missing(name) for name in tensors if name not in self.tensors)
        known = {**optional, **tensors}
        wrong = (self._wrong(name, tensor, known.get(name)) for name, tensor in self.tensors.items())
        problems = [problem for problem in (*missing, *wrong) if problem]
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            what = "the file's metadata" if self.gguf else "config.json"
            raise WeightsError(f"the weights do not fit {what}:\n  " + "\n  ".join(problems[:8]) + more)

    def _missing(self, name: str) -> str:
        if self.gguf:
            return f"{theirs(name, self.gguf)} is missing from {self.files[0]}"
        file = self.index.get(name, INDEX if self.index else SINGLE)
        return f"{name} is missing from {self.directory / file}"

    def _wrong(self, name: str, tensor: StoredTensor, expected: Expected | None) -> str | None:
        """What is wrong with a stored tensor, given what is expected (None: it is not expected)."""
        if expected is None:
            return (
                None
                if name.endswith(IGNORED)
                else f"{theirs(name, self.gguf) if self.gguf else name} in {tensor.file} is unexpected"
            )
        shape, kinds = expected
        if self.gguf:  # files with other types were refused when opened
            name, kinds = theirs(name, self.gguf), (*kinds, *(BLOCK_BYTES if len(shape) > 1 else ()))
        if tensor.shape != shape and (shape, tensor.shape) != ((1,), ()):
            return f"{name} in {tensor.file} has shape {list(tensor.shape)}, expected {list(shape)}"
        if tensor.dtype not in kinds:
            return f"{name} in {tensor.file} has type {tensor.dtype}; supported: {', '.join(kinds)}"
        return None


def files_of(directory: Path) -> tuple[Path, ...]:
    """The files that hold the weights. Raises WeightsError if they cannot be determined."""
    if (directory / LINK).is_symlink():
        return parts_of((directory / LINK).readlink())
    return _files(directory, {} if (directory / SINGLE).exists() else _index(directory))


def _files(directory: Path, index: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(directory / name for name in sorted(set(index.values()))) or (directory / SINGLE,)


def _names(stored: Iterable[str]) -> dict[str, str]:
    """A file's tensor names, by their names here."""
    found: dict[str, str] = {}
    for name in stored:
        if (own := tensor_name(name)) in found:
            raise WeightsError(f"{found[own]} and {name} are one tensor by two names")
        found[own] = name
    return found


class _Renamed:
    """A file's reader that uses our names."""

    def __init__(self, reader: Any) -> None:
        self._reader, self._own = reader, _names(reader.offset_keys())

    def offset_keys(self) -> list[str]:
        """All names, in the order of the file."""
        return list(self._own)

    def get_tensor(self, name: str) -> Any:
        """The tensor with this name."""
        return self._reader.get_tensor(self._own[name])


def _index(directory: Path) -> dict[str, str]:
    """File name by tensor name, for a checkpoint in several files."""
    path = directory / INDEX
    if not path.exists():
        found = sorted(
            file.name for file in directory.glob("*") if file.suffix in (".safetensors", ".bin", ".pth", ".gguf")
        )
        raise WeightsError(
            f"{directory}: neither {SINGLE} nor {INDEX} is there (weight files found: {', '.join(found) or 'none'})"
        )
    section = Fields.read(path).section("weight_map")
    if section is None or not all(isinstance(file, str) for file in section.values.values()):
        raise WeightsError(f"{path}: weight_map must name a file for each tensor")
    return dict(section.values)


def _header(file: Path) -> Iterator[tuple[str, str, StoredTensor]]:
    """For each tensor: its name here, its name in the file, and its entry."""
    if not file.exists():
        raise WeightsError(f"{file}: named by {INDEX}, but not there; the download may be incomplete")
    try:
        with safe_open(file, framework="np") as tensors:
            for name, own in _names(tensors.offset_keys()).items():
                entry = tensors.get_slice(own)
                yield name, own, StoredTensor(file, tuple(entry.get_shape()), entry.get_dtype())
    except SafetensorError as error:
        raise WeightsError(f"{file}: not a complete safetensors file ({error})") from error


def header_names(directory: Path) -> list[str]:
    """The names of a model's tensors, only from safetensors headers; none if those cannot be read. For a GGUF file one
    name of its MTP layer, if it has one."""
    try:
        if (directory / LINK).is_symlink():
            return [PREDICTS] if Fields.read(directory / "config.json").get(PREDICTED) else []
        if not (directory / SINGLE).exists():
            return list(_index(directory))
        with (directory / SINGLE).open("rb") as file:
            return list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (ModelError, OSError, ValueError, MemoryError, OverflowError):  # loading the model reports what is wrong
        return []


_NAME, _GGUF_NAME = "model.norm.weight", "output_norm.weight"


def final_norm_digest(directory: Path) -> str:
    """The sha256 of the last norm's weight in fp32, in hex; "" if it cannot be read. Quantising does not change it,
    training does."""
    try:
        if (directory / LINK).is_symlink():
            numbers = np.array(GgufFile.read((directory / LINK).readlink()).floats(_GGUF_NAME), np.float32)
        else:
            numbers = _of_safetensors(directory)
    except (ModelError, OSError, ValueError, KeyError, TypeError):  # loading the model reports what is wrong
        return ""
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def _of_safetensors(directory: Path) -> NDArray[np.float32]:
    path = directory / SINGLE
    if not path.exists():
        index = json.loads((directory / INDEX).read_text("utf-8"))["weight_map"]
        path = directory / index[_names(index)[_NAME]]
    with path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
        header = json.loads(file.read(size))
        entry = header[_names(header)[_NAME]]
        begin, end = entry["data_offsets"]
        file.seek(8 + size + begin)
        raw = file.read(end - begin)
    if entry["dtype"] == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
