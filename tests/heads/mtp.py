"""A layer that predicts further tokens for a random Qwen3.5, dense or a mixture, of transformers' own parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from tests.verifier.families import config_of


class Mtp(nn.Module):
    """One; its names are those in files, behind ``mtp.``."""

    def __init__(self, seed: int = 5, family: str = "qwen3_5") -> None:
        super().__init__()
        self.config = config_of(family, layer_types=["full_attention"], num_hidden_layers=1)
        hidden = self.config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden), Qwen3_5RMSNorm(hidden)
        self.norm = Qwen3_5RMSNorm(hidden)
        kind = Qwen3_5DecoderLayer if family == "qwen3_5" else Qwen3_5MoeDecoderLayer
        self.layers = nn.ModuleList([kind(self.config, 0)])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                size = 0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[1] ** 0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))

    @torch.inference_mode()
    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[R, H], behind the last norm. embedded, hidden: [R, H], of tokens from position 1 on and of those before."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1))[None]
        rotation = Qwen3_5TextRotaryEmbedding(self.config)(x, torch.arange(1, len(embedded) + 1)[None])
        mask = torch.full((len(embedded),) * 2, float("-inf")).triu(1)[None, None]
        found: Any = self.layers[0](x, position_embeddings=rotation, attention_mask=mask)
        normed: Tensor = self.norm(found[0] if isinstance(found, tuple) else found)[0]
        return normed

    def put_beside(self, directory: Path) -> None:
        """Into the checkpoint in ``directory``."""
        own = {f"mtp.{name}": part.detach().clone() for name, part in self.state_dict().items()}
        file = directory / "model.safetensors"
        save_file({**load_file(file), **own}, file, metadata={"format": "pt"})
