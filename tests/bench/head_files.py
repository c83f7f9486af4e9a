"""Heads written to directories, as ``foresay train`` lays them out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from foresay.drafters.heads.dflash_model import DFlashModel
from foresay.drafters.heads.eagle_model import EagleModel
from foresay.drafters.heads.medusa_model import MedusaModel


def write(path: Path, model: MedusaModel | EagleModel | DFlashModel, dtype: torch.dtype, prefix: str = "") -> None:
    """Weights and config.json. prefix: in front of every tensor's name."""
    path.mkdir(exist_ok=True)
    file = "medusa_lm_head.safetensors" if isinstance(model, MedusaModel) else "model.safetensors"
    tensors = {
        f"{prefix}{name}": tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.published().items()
    }
    save_file(tensors, path / file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(model.config("target")))
