"""Files of a training run, none of which is ever seen half-written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec.errors import ForesayError
from verifier.heads.files import save_tensors


class DiskError(ForesayError):
    """A file of the run cannot be written."""


def write(path: Path, writer: Callable[[Path], object]) -> None:
    """Let ``writer`` write a file beside ``path``, then put it in its place at once."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(partial)
        partial.chmod(0o644)  # safetensors makes files that nobody else may read, and a server may be somebody else
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch and safetensors report a full disk as errors of their own
        partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DiskError(f"{path}: cannot be written ({reason})") from error


def save(path: Path, value: Any) -> None:
    """``torch.save``, at once."""
    write(path, lambda partial: torch.save(value, partial))


def publish(out: Path, file: str, tensors: dict[str, Tensor], config: dict[str, object], dtype: torch.dtype) -> None:
    """A head's directory: the weights in ``file`` first, then its config.json, which makes it a head."""
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    write(out / file, lambda partial: save_tensors(partial, cast))
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    write(out / "config.json", lambda partial: partial.write_text(text, encoding="utf-8"))


def remove(directory: Path) -> None:
    """Remove a run's own folder."""
    shutil.rmtree(directory, ignore_errors=True)
