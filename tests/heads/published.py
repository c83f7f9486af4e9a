"""Random Medusa heads for a target, written as each of the published layouts has them; EAGLE heads are next to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresay.verifier.model.decoder import Decoder
from tests.heads.plain import Weights
from tests.heads.published_eagle import EAGLE, draft_ids, make_eagle
from tests.heads.writing import noise, output_matrix, write_config, write_weights

__all__ = ["EAGLE", "MEDUSA", "draft_ids", "make_eagle", "make_medusa"]

#: Layouts of Medusa heads. A whole model lies around the heads of ``medusa2``.
MEDUSA = ["authors", "pickle", "medusa2", "tied_output", "vllm", "vllm_truncated", "vllm_shared"]
BLOCKS = 2


def make_medusa(directory: Path, target: Decoder, layout: str, heads: int = 3) -> tuple[Weights, Tensor | None]:
    """Write the heads; returns them in the authors' names and the truncated vocabulary, if there is one.

    The weights returned have an output matrix for every head and only the rows that count.
    """
    generator = torch.Generator().manual_seed(7)
    width, vocab = target.config.hidden_size, target.config.vocab_size
    plain: Weights = {}
    for head in range(heads):
        for block in range(BLOCKS):
            plain[f"{head}.{block}.linear.weight"] = noise(generator, width, width)
            plain[f"{head}.{block}.linear.bias"] = noise(generator, width)
        plain[f"{head}.{BLOCKS}.weight"] = noise(generator, vocab, width, scale=2.5)
    if layout.startswith("vllm"):
        return _write_vllm(directory, plain, layout, heads, vocab, width)
    config = {
        "medusa_num_heads": 2,  # wrong, as in the published files
        "medusa_num_layers": BLOCKS,
        "base_model_name_or_path": "someone/target",
    }
    write_config(directory, config)
    stored = dict(plain)
    if layout == "tied_output":
        matrix = output_matrix(target)
        for head in range(heads):
            del stored[f"{head}.{BLOCKS}.weight"]
            plain[f"{head}.{BLOCKS}.weight"] = matrix
    if layout == "medusa2":
        stored = {f"medusa_head.{name}": tensor for name, tensor in stored.items()}
        stored |= {"model.norm.weight": torch.ones(width), "lm_head.weight": noise(generator, vocab, width)}
    file = {"pickle": "medusa_lm_head.pt", "medusa2": "sharded"}.get(layout, "medusa_lm_head.safetensors")
    write_weights(directory, stored, file)
    return plain, None


def _write_vllm(
    directory: Path, plain: Weights, layout: str, heads: int, vocab: int, width: int
) -> tuple[Weights, Tensor | None]:
    config: dict[str, Any] = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": width, "vocab_size": vocab,
        "num_heads": heads, "num_hidden_layers": BLOCKS, "medusa_fc_bias": True, "truncated_vocab_size": vocab,
        "original_lm_head": layout == "vllm_shared",
    }  # fmt: skip
    token_map, stored = None, {}
    if layout == "vllm_truncated":
        token_map = torch.arange(3, vocab, 4)
        config["truncated_vocab_size"] = len(token_map)
        stored["token_map"] = token_map
    for name, tensor in plain.items():
        number, block, *rest = name.split(".")
        if rest == ["weight"]:
            if layout != "vllm_shared" or number == "0":
                stored[f"medusa_heads.lm_heads.{number}.weight"] = tensor
        else:
            stored[f"medusa_heads.blocks.{number}.layers.{block}.{rest[1]}"] = tensor
    for head in range(heads):
        name = f"{head}.{BLOCKS}.weight"
        plain[name] = plain[f"0.{BLOCKS}.weight"] if layout == "vllm_shared" else plain[name]
        plain[name] = plain[name] if token_map is None else plain[name][token_map]
    write_config(directory, config)
    write_weights(directory, stored, "model.safetensors")
    return plain, token_map
