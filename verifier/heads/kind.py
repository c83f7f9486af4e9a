"""Which kind of head a directory holds, by its own configuration and the names of its files and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from verifier.heads.eagle_config import is_eagle3
from verifier.model.checkpoint import SINGLE
from verifier.model.fields import Fields

Kind = Literal["medusa", "eagle"]

#: Files that a head's repository may hold beside those of a model.
PATTERNS = ("medusa_lm_head.*", "pytorch_model*.bin*")


def kind_of(directory: Path) -> Kind | None:
    """The kind of head in ``directory``; None for a model (or something unknown)."""
    fields = Fields.read(directory / "config.json")
    if fields.get("model_type") == "medusa" or fields.get("medusa_num_heads") is not None:
        return "medusa"
    if any(directory.glob("medusa_lm_head.*")):
        return "medusa"
    if is_eagle3(fields) or (fields.get("num_hidden_layers") == 1 and _has_mixer(directory)):
        return "eagle"
    return None


def _has_mixer(directory: Path) -> bool:
    """Whether there is ``fc.weight``, which a model of one layer has not. A broken file is for its loader to name."""
    try:
        with safe_open(directory / SINGLE, framework="pt") as tensors:
            return "fc.weight" in tensors.offset_keys()
    except (OSError, SafetensorError):
        return not (directory / SINGLE).exists()
