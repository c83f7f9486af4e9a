"""Shapes of trained models, derived from the target's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, arange

from foresay.drafters.heads.dflash_model import DFlashShape
from foresay.drafters.heads.eagle_model import EagleShape

#: A draft model's width is a multiple of this.
WIDTH_STEP = 8


def draft_vocabulary(written: Tensor, vocab_size: int, most: int) -> Tensor:
    """int64[V'], ascending: all tokens, or the ``most`` most frequent in the target's texts. written: int64[T]."""
    if vocab_size <= most:
        return arange(vocab_size)
    return written.bincount(minlength=vocab_size).topk(most).indices.sort().values


def eagle_shape(config: Any, draft_vocab: int) -> EagleShape:
    """A layer shaped like the target's, which reads the inputs of an early, a middle and a late layer."""
    layers = config.num_hidden_layers
    first = layers // 4
    if first == 1:  # a list that begins with 1 is read as layer outputs
        first = 2 if layers >= 6 else 0
    chosen = (2, layers // 2, layers - 3) if layers >= 16 else (first, layers // 2, layers - 1)
    return EagleShape(draft_vocab_size=draft_vocab, layers=chosen, **_shared(config))


def dflash_shape(config: Any, layers: int, guesses: int, draft_vocab: int) -> DFlashShape:
    """Layers shaped like the target's, which read up to five of its layers, from an early one to a late one."""
    depth = config.num_hidden_layers
    first, last = (2, depth - 2) if depth >= 6 else (1, depth - 1)
    count = min(5, last - first + 1)
    read = sorted({round(first + number * (last - first) / max(1, count - 1)) for number in range(count)})
    return DFlashShape(
        draft_vocab_size=draft_vocab,
        num_hidden_layers=layers,
        layers=tuple(read),
        target_layers=depth,
        block_size=guesses + 1,
        mask_token_id=config.vocab_size - 1,
        **_shared(config),
    )


def draft_shape(config: Any, layers: int, width: int) -> dict[str, object]:
    """The config.json of a Llama with this many layers and this width, with heads of the target's size and about as
    many for its width."""
    share = width / config.hidden_size
    heads = max(1, round(config.num_attention_heads * share))
    shared = _shared(config)
    most = max(1, round(shared["num_key_value_heads"] * share))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shared,
        "hidden_size": width,
        "intermediate_size": max(1, round(config.intermediate_size * share / WIDTH_STEP)) * WIDTH_STEP,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": next(count for count in range(most, 0, -1) if heads % count == 0),
        "rope_parameters": {"rope_theta": shared["rope_theta"], "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def default_layers(layers: int, most: int | None = None) -> int:
    """A quarter of the target's layers, up to ``most``."""
    return max(1, min(layers // 4, most or layers))


def default_width(width: int) -> int:
    """Half of the target's width."""
    return max(1, width // 2 // WIDTH_STEP) * WIDTH_STEP


def _shared(config: Any) -> dict[str, Any]:
    """The values that heads share with their target, and draft models except for their width."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0),
        "max_position_embeddings": config.max_position_embeddings,
    }
