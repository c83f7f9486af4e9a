"""Files of a training run, none of which is ever seen half-written."""

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
from foresay.verifier.model.written import save_tensors

#: Writes a whole file to the path it is given.
Writer = Callable[[Path], object]


class DiskError(ForesayError):
    """A file of the run cannot be written, or one that was cannot be read."""


def write(path: Path, writer: Writer) -> None:
    """Let ``writer`` write a file beside ``path``, then put it in its place at once.

    Raises DiskError with file and reason, and leaves what was in its place, if that cannot be.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)  # safetensors makes files that nobody else may read, and a server may be somebody else
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise DiskError(
            f"{path}: cannot be written ({_reason(error)}); once that is fixed, run the same command to continue"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _reason(error: BaseException) -> str:
    """The system's own words, where there are any: torch hides them behind its own, safetensors puts others before."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^Error while serializing: I/O error: (.*) \(os error \d+\)$", r"\1", line)


def save(path: Path, value: Any) -> None:
    """``torch.save``, at once."""

    def writer(partial: Path) -> None:
        with partial.open("wb") as file:  # given a path, torch does not say why it cannot write
            torch.save(value, file)

    write(path, writer)


def load(path: Path) -> Any:
    """What :func:`save` wrote, on the CPU. Raises DiskError for a file that is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise damaged(path) from error


def damaged(path: Path) -> DiskError:
    """What is said of a file that does not hold what was written to it."""
    return DiskError(f"{path}: is damaged or cannot be read; remove it, and the same command makes it again")


def publish(out: Path, parts: Mapping[str, Writer]) -> None:
    """The files of a model by name, the one that makes it a model (config.json) last.

    If one cannot be written, none of them stays.
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
    """A safetensors file, numbers in ``dtype``."""
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return lambda partial: save_tensors(partial, cast)


def text(value: Mapping[str, object]) -> Writer:
    """A JSON file."""
    return lambda partial: partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy(source: Path) -> Writer:
    """A copy."""
    return lambda partial: shutil.copyfile(source, partial)
