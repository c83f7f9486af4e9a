"""Files of a training run, which are all written atomically."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresay.spec.errors import ForesayError
from foresay.verifier.model.save_quantized import save_tensors

#: Writes a whole file to the given path.
Writer = Callable[[Path], object]


class DiskError(ForesayError):
    """A file of the run cannot be written, or cannot be read again."""


def write(path: Path, writer: Writer) -> None:
    """Let ``writer`` write a file next to ``path``, then rename it atomically.

    If that fails, raises DiskError with file and reason, and leaves what was there.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)  # safetensors writes files for their owner only, but a server may run as another user
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise DiskError(
            f"{path}: cannot be written ({_reason(error)}); once that is fixed, run the same command to continue"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _reason(error: BaseException) -> str:
    """The system's error message, if there is one: torch hides it behind its own, safetensors adds a prefix."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^Error while serializing: I/O error: (.*) \(os error \d+\)$", r"\1", line)


def save(path: Path, value: Any) -> None:
    """``torch.save``, atomically."""

    def writer(partial: Path) -> None:
        with partial.open("wb") as file:  # given a path, torch does not say why it cannot write
            torch.save(value, file)

    write(path, writer)


def load(path: Path) -> Any:
    """Load what :func:`save` wrote, on the CPU. Raises DiskError if the file is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise damaged(path) from error


def damaged(path: Path) -> DiskError:
    """The error for a file that does not hold what was written to it."""
    return DiskError(f"{path}: is damaged or cannot be read; remove it, and the same command makes it again")


def publish(out: Path, parts: Mapping[str, Writer]) -> None:
    """Write the files of a model, by name; the one that makes it a model (config.json) comes last.

    If one cannot be written, all of them are removed.
    """
    fresh = not out.exists()
    try:
        for name, writer in parts.items():
            write(out / name, writer)
    except DiskError:
        with suppress(OSError):
            for name in parts:
                (out / name).unlink(missing_ok=True)
            if fresh:
                out.rmdir()
        raise


def weights(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Writer:
    """A safetensors file, with floats in ``dtype``."""
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return lambda partial: save_tensors(partial, cast)


def text(value: Mapping[str, object]) -> Writer:
    """A JSON file."""
    return lambda partial: partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy(source: Path) -> Writer:
    """A copy."""
    return lambda partial: shutil.copyfile(source, partial)
