"""Random heads of every kind, written to directories as ``foresay train`` lays them out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foresay.drafters.heads.dflash_model import DFlashModel, DFlashShape
from foresay.drafters.heads.eagle_model import EagleModel, EagleShape
from foresay.drafters.heads.medusa_model import MedusaModel

Head = MedusaModel | EagleModel | DFlashModel


def random_head(kind: str, matrices: tuple[Tensor, Tensor], token_ids: Tensor, layers: Sequence[int]) -> Head:
    """matrices: the target's embedding and output head, [V, H]. token_ids: those that an EAGLE head drafts. layers: of
    the target's, which a DFlash head reads; the last one and those before it are all that the target has."""
    torch.manual_seed(7)
    embedding, output = matrices
    vocab_size, hidden = embedding.shape
    layer: Any = {
        "vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": 40, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 64,
    }  # fmt: skip
    made: Head
    if kind == "medusa":
        made = MedusaModel(output, 3)
    elif kind == "eagle3":
        shape = EagleShape(**layer, draft_vocab_size=len(token_ids), layers=(0, 1, 2))
        made = EagleModel(shape, embedding, token_ids, output, passes=3)
    else:
        own = {"draft_vocab_size": vocab_size, "num_hidden_layers": 2, "target_layers": layers[-1] + 1}
        block = DFlashShape(**layer, **own, layers=tuple(layers), block_size=4, mask_token_id=7)
        made = DFlashModel(block, embedding, torch.arange(vocab_size), output)
    for parameter in filter(lambda each: each.requires_grad, made.parameters()):
        low, high = (0.3, 1.7) if parameter.ndim == 1 else (-0.3, 0.3)
        torch.nn.init.uniform_(parameter, low, high)
    return made


def write(path: Path, model: Head, dtype: torch.dtype, prefix: str = "") -> None:
    """Weights and config.json. prefix: in front of every tensor's name."""
    path.mkdir(exist_ok=True)
    file = "medusa_lm_head.safetensors" if isinstance(model, MedusaModel) else "model.safetensors"
    tensors = {
        f"{prefix}{name}": tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.published().items()
    }
    save_file(tensors, path / file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(model.config("target")))
