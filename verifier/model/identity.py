"""By what a model is known, whatever its files are called and however few bits its matrices have. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foresay.verifier.model.errors import ModelError
from foresay.verifier.model.gguf.file import GgufFile
from foresay.verifier.model.gguf.parts import LINK

_NAME, _GGUF_NAME = "model.norm.weight", "output_norm.weight"


def final_norm_digest(directory: Path) -> str:
    """The sha256 of the last norm's weight in fp32, in hex; "" where there is none that can be read. No quantiser
    changes it, and training does."""
    try:
        if (directory / LINK).is_symlink():
            numbers = np.array(GgufFile.read((directory / LINK).readlink()).floats(_GGUF_NAME), np.float32)
        else:
            numbers = _of_safetensors(directory)
    except (ModelError, OSError, ValueError, KeyError, TypeError):  # whoever loads it says what is wrong
        return ""
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def _of_safetensors(directory: Path) -> NDArray[np.float32]:
    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    path = whole if whole.exists() else directory / json.loads(index.read_text("utf-8"))["weight_map"][_NAME]
    with path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
        entry = json.loads(file.read(size))[_NAME]
        begin, end = entry["data_offsets"]
        file.seek(8 + size + begin)
        raw = file.read(end - begin)
    if entry["dtype"] == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
