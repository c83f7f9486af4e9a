"""A GGUF file: its metadata, and its tensors by name, type and offset. Imports no torch.

::

    "GGUF", version, numbers of tensors and of keys
    key, type, value            for each key
    name, dims, type, offset    for each tensor; the first dim is the contiguous one (aligned) the tensors

All is little-endian. A string is its length in 64 bits, and its bytes. llama.cpp's ``gguf-split`` splits a file into
several: then each has tensors, and the first one the metadata::

    name-00001-of-00003.gguf    the first: metadata, and perhaps tensors
    name-00002-of-00003.gguf    more tensors
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.verifier.model.errors import NoSuchModel, WeightsError
from foresay.verifier.model.quantization import Format, Scheme

_PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
#: The file's name in a directory made from it.
LINK = "model.gguf"
#: Of several files, if none is named: small, and close to the original in quality.
DEFAULT = "Q4_K_M"
#: Files of a vision encoder, which are not read.
_PROJECTOR = "mmproj"


def first_of(name: str) -> str:
    """The first part's name; an unsplit file is its only part."""
    return _PART.sub(r"-00001-of-\1", name)


def parts_of(file: Path) -> tuple[Path, ...]:
    """All parts, the first one first."""
    found = _PART.search(file.name)
    if found is None:
        return (file,)
    return tuple(file.with_name(_PART.sub(rf"-{number:05}-of-\1", file.name)) for number in range(1, int(found[1]) + 1))


def first_parts(names: Iterable[str]) -> list[str]:
    """The model's GGUF files among these, each by its first part."""
    return sorted({first_of(name) for name in names if name.endswith(".gguf") and _PROJECTOR not in name.lower()})


def chosen(names: Iterable[str], wanted: str) -> str | None:
    """The first part of the wanted file: by its name, or by a word in it, such as ``Q4_K_M``; "" for the only one, or
    ``DEFAULT`` of several. None if there is no GGUF file at all. Raises NoSuchModel if none matches, or several do.
    """
    files = first_parts(names)
    if not files:
        return None
    word = re.compile(rf"(?<![a-z0-9]){re.escape((wanted or DEFAULT).lower())}(?![a-z0-9_])")
    found = [name for name in files if first_of(wanted) == name]
    found = found or [name for name in files if word.search(_PART.sub("", name.lower()))]
    if not wanted and (len(files) == 1 or not found):
        found = files
    if len(found) != 1:
        what = "several GGUF files" if found or not wanted else f"no GGUF file called {wanted}"
        raise NoSuchModel(f"has {what} ({', '.join(found or files)}): name one after a colon, as in OWNER/NAME:Q4_K_M")
    return found[0]


MAGIC = b"GGUF"
_ALIGNMENT = "general.alignment"
_NUMBER, _COUNT = "split.no", "split.count"
#: Formats of struct by the numbers of metadata's types; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: More values in an array, tensors and dims than any model has: a file with more is damaged.
_MOST_VALUES, _MOST_TENSORS, _MOST_DIMS = 1 << 26, 1 << 17, 4


@dataclass(frozen=True, slots=True)
class Type:
    """A storage type: the numbers and bytes of a block. scheme: what these are as integers; None for floats."""

    name: str
    numbers: int
    size: int
    scheme: Scheme | None = None


F32, F16, BF16 = Type("F32", 1, 4), Type("F16", 1, 2), Type("BF16", 1, 2)
#: The supported types, by their numbers in files. :mod:`foresay.verifier.model.gguf.weights` reads them.
TYPES = {
    0: F32,
    1: F16,
    2: Type("Q4_0", 32, 18, Scheme(4, 32, True, Format.GGUF)),
    3: Type("Q4_1", 32, 20, Scheme(4, 32, True, Format.GGUF, 32, True, ones=True)),
    6: Type("Q5_0", 32, 22, Scheme(8, 32, True, Format.GGUF)),
    7: Type("Q5_1", 32, 24, Scheme(8, 32, True, Format.GGUF, 32, True, ones=True)),
    8: Type("Q8_0", 32, 34, Scheme(8, 32, True, Format.GGUF)),
    12: Type("Q4_K", 256, 144, Scheme(4, 32, True, Format.GGUF, 256, True)),
    13: Type("Q5_K", 256, 176, Scheme(8, 32, True, Format.GGUF, 256, True)),
    14: Type("Q6_K", 256, 210, Scheme(8, 16, True, Format.GGUF, 256)),
    30: BF16,
    39: Type("MXFP4", 32, 17, Scheme(4, 32, True, Format.GGUF, floats=True)),
    40: Type("NVFP4", 64, 36, Scheme(4, 16, True, Format.GGUF, floats=True)),
}
SCHEMES = {one.name: one.scheme for one in TYPES.values() if one.scheme is not None}
#: The names of the others, for messages.
_OTHERS = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS",
           17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
           25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}  # fmt: skip
SUPPORTED = ", ".join(one.name for one in TYPES.values())


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: outermost first, as in torch. start: its offset in the file. path: the file."""

    shape: tuple[int, ...]
    type: Type
    start: int
    path: Path

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.numbers * self.type.size


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What precedes the weights, and where they are. path: of several files the first."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read all its parts. Raises WeightsError if it is not such a file, is incomplete, or has tensors of
        unsupported types."""
        parts = [cls._part(part) for part in parts_of(path)]
        tensors = dict(one for part in parts for one in part.tensors.items())
        if len(tensors) < sum(len(part.tensors) for part in parts):
            raise WeightsError(f"{path}: has two tensors of one name")
        for number, part in enumerate(parts):
            numbers = part.metadata.get(_NUMBER, 0), part.metadata.get(_COUNT, 1) or 1
            if numbers != (number, len(parts)):
                raise WeightsError(f"{part.path}: says that it is part {numbers[0] + 1} of {numbers[1]}: {_NAMES}")
        return cls(parts[0].path, parts[0].metadata, tensors)

    @property
    def architecture(self) -> str:
        """The family, by its GGUF name."""
        return str(self.metadata.get("general.architecture", "unnamed"))

    @property
    def files(self) -> tuple[Path, ...]:
        """All parts."""
        return parts_of(self.path)

    @classmethod
    def _part(cls, path: Path) -> GgufFile:
        try:
            with path.open("rb") as file:
                _check_beginning(path, file.read(8))
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _read(path, data)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
        except (struct.error, OverflowError) as error:
            raise WeightsError(f"{path}: {_CUT}") from error

    def floats(self, name: str) -> list[float]:
        """The numbers of a short fp32 tensor."""
        tensor = self.tensors[name]
        if tensor.type != F32 or len(tensor.shape) != 1:
            raise WeightsError(f"{self.path}: {name} must be a row of {F32.name}")
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.nbytes)))


_NAMES = "parts keep the names that gguf-split gave them (NAME-00001-of-00002.gguf)"
_CUT = "the file is incomplete; the download may be incomplete"


def _check_beginning(path: Path, start: bytes) -> None:
    if start[:4] != MAGIC:
        raise WeightsError(f"{path}: is not a GGUF file: it begins with {start[:4]!r}")
    (version,) = struct.unpack("<I", start[4:])
    if version & 0xFFFF == 0:
        raise WeightsError(f"{path}: is big-endian, which is not supported; convert the model again, little-endian")
    if version not in (2, 3):
        raise WeightsError(f"{path}: has GGUF version {version}; supported: 2 and 3")


@dataclass
class _Cursor:
    """Reads values one after the other."""

    data: mmap.mmap
    at: int

    def take(self, form: str) -> Any:
        """One number."""
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        """One string."""
        size = self.take("Q")
        if size > len(self.data) - self.at:
            raise struct.error
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """Consecutive strings: a vocabulary has 100,000, so this avoids a call for each."""
        data, at, size_at, found = self.data, self.at, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = at + 8
            at = start + size_at(data, at)[0]
            if at > len(data):
                raise struct.error
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        """One value of metadata."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind != _ARRAY:
            raise struct.error
        inner, count = self.take("I"), self.take("Q")
        if count > _MOST_VALUES or count > len(self.data):
            raise struct.error
        if inner == _STRING:
            return self.texts(count)
        if inner not in _SCALARS:  # llama.cpp reads no arrays of arrays either
            raise struct.error
        form = f"<{count}{_SCALARS[inner]}"
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return list(values)


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data, 8)
    tensors, keys = cursor.take("Q"), cursor.take("Q")
    if max(tensors, keys) > _MOST_TENSORS:
        raise struct.error
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.take("I"))
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1:
        raise WeightsError(f"{path}: {_ALIGNMENT} must be a whole number from 1, got {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    found = {name: _tensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in entries}
    if len(found) < len(entries):
        raise WeightsError(f"{path}: has two tensors of one name")
    for name, tensor in found.items():
        if tensor.start + tensor.nbytes > len(data):
            raise WeightsError(f"{path}: {name} ends past the end of the file: {_CUT}")
    return GgufFile(path, metadata, found)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, count = cursor.text(), cursor.take("I")
    if count > _MOST_DIMS:
        raise struct.error
    dims = [cursor.take("Q") for _ in range(count)]
    return name, tuple(reversed(dims)), cursor.take("I"), cursor.take("Q")


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    if kind not in TYPES:
        called = _OTHERS.get(kind, f"number {kind}")
        raise WeightsError(f"{path}: {name} has type {called}, which is not supported; supported: {SUPPORTED}")
    found = TYPES[kind]
    if not shape or shape[-1] % found.numbers:
        raise WeightsError(f"{path}: {name} of type {found.name} has shape {list(shape)}, not a whole number of blocks")
    return GgufTensor(shape, found, start, path)
