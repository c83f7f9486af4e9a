"""A target whose likeliest text is a given one, by construction: a real checkpoint for the real engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from foresay.server.settings.resolved import BUNDLED

#: Of its hidden state: where each piece of the text has a coordinate, and a head of attention room.
_WIDTH = 64
_END = 0


def saying(directory: Path, *pieces: str, context: int = 1024, special: Sequence[str] = ()) -> str:
    """Write the target into ``directory`` and return it. It says ``pieces`` whatever was before, and ends.

    The tokenizer is the bundled one, in which each piece is one more token. Attention and MLP add nothing, so that what
    follows hangs on the last token alone: on the end of a prompt the first piece, on a piece the next one.
    special: control tokens that the tokenizer has besides.
    """
    source = BUNDLED / "target"
    directory.mkdir(exist_ok=True)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    tokenizer, config = (json.loads((source / f"{name}.json").read_text()) for name in ("tokenizer", "config"))
    assert not {*pieces, *special} & {*tokenizer["model"]["vocab"]}, "these are tokens already"
    first = config["vocab_size"]
    tokenizer["added_tokens"] += [
        dict(tokenizer["added_tokens"][0], id=first + index, content=text, special=text in special)
        for index, text in enumerate((*pieces, *special))
    ]
    shape = {"hidden_size": _WIDTH, "intermediate_size": _WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "head_dim": _WIDTH, "vocab_size": first + len(pieces) + len(special)}
    config |= shape | {"max_position_embeddings": context, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(_weights(config["vocab_size"], first, len(pieces)), directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def _weights(vocabulary: int, first: int, pieces: int) -> dict[str, torch.Tensor]:
    """Llama's, of one layer. A token's embedding is the coordinate of the piece that it is, or that of all others; the
    row of the token that follows points there."""
    own = torch.arange(pieces)
    embedding, head = torch.zeros(vocabulary, _WIDTH), torch.zeros(vocabulary, _WIDTH)
    embedding[:, 0] = 1
    embedding[first + own] = torch.eye(_WIDTH)[1 + own]
    head[[*(first + own), _END], torch.arange(pieces + 1)] = 4
    layer = {f"self_attn.{name}_proj": torch.zeros(_WIDTH, _WIDTH) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj": torch.zeros(_WIDTH, _WIDTH) for name in ("gate", "up", "down")}
    layer |= {name: torch.ones(_WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    named = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    named |= {"model.embed_tokens": embedding, "model.norm": torch.ones(_WIDTH), "lm_head": head}
    return {f"{name}.weight": tensor.to(torch.bfloat16) for name, tensor in named.items()}
