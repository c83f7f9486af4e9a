"""Which kind of head a directory holds, by its own configuration and the names of its files and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from foresay.verifier.heads.dflash_config import is_dflash
from foresay.verifier.heads.eagle_config import is_eagle3
from foresay.verifier.heads.files import stored_names
from foresay.verifier.model.fields import Fields

Kind = Literal["medusa", "eagle", "dflash"]

#: Files that a head's repository may hold beside those of a model.
PATTERNS = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)


def kind_of(directory: Path) -> Kind | None:
    """The kind of head in ``directory``; None for a model (or something unknown)."""
    fields = Fields.read(directory / "config.json")
    if fields.get("model_type") == "medusa" or fields.get("medusa_num_heads") is not None:
        return "medusa"
    if any(directory.glob("medusa_lm_head.*")):
        return "medusa"
    if is_dflash(fields):
        return "dflash"
    if fields.get("speculators_model_type") is not None or is_eagle3(fields) or _has_mixer(directory, fields):
        return "eagle"
    return None


def _has_mixer(directory: Path, fields: Fields) -> bool:
    """Whether there is the matrix that mixes feature and embedding, which no model has.

    A pickle is not opened for that: models are not read from pickles, so one layer tells enough.
    """
    names = stored_names(directory)
    if names:
        return "fc.weight" in names
    return bool(fields.get("num_hidden_layers") == 1)
