"""Random assistants for a random Gemma 4, written by transformers, and what transformers computes with them.

transformers 5.23 cannot make one as it stands: in a model whose layers all read another's keys and values it looks for
the layer that would keep them, and raises. That one question is answered here; everything else is its own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from foresay.verifier.model.config import ModelConfig
from tests.verifier.families import randomise

KINDS = {
    "gemma4": (Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM),
    "unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM),
}
LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
#: Of 300 tokens, 10 in a cluster, of which 4 get logits.
CLUSTERED: dict[str, Any] = {"use_ordered_embeddings": True, "num_centroids": 30, "centroid_intermediate_top_k": 4}


@contextmanager
def reading_all() -> Iterator[None]:
    """In this block the configurations of both kinds may share the keys and values of all layers."""
    of_text, of_unified = (_modes(kind) for kind in (Gemma4TextConfig, Gemma4UnifiedTextConfig))
    with (
        patch.object(Gemma4TextConfig, "kv_sharing_modes", of_text),
        patch.object(Gemma4UnifiedTextConfig, "kv_sharing_modes", of_unified),
    ):
        yield


def _modes(kind: Any) -> Any:
    own = kind.kv_sharing_modes.fget

    def found(self: Any) -> Any:
        whole = self.num_kv_shared_layers == self.num_hidden_layers
        return ["reuse"] * self.num_hidden_layers if whole else own(self)

    return property(found)


def text_of(target: ModelConfig, kind: str, **changes: Any) -> Any:
    """The configuration of the layers of an assistant for this target, as transformers has it."""
    attentions = [one for one in target.stack.attentions if one.source is None]
    sliding, full = (next(one for one in attentions if (one.window is None) == whole) for whole in (False, True))
    values = {
        "vocab_size": target.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": sliding.kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "attention_k_eq_v": True,  # without it transformers ignores the line before
        "num_kv_shared_layers": len(LAYERS),
        "sliding_window": sliding.window,
        "max_position_embeddings": target.max_positions,
        "final_logit_softcapping": 30.0,  # which an assistant ignores
    }
    if kind == "gemma4":
        values |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    return KINDS[kind][0](**values | changes)


def make_assistant(
    directory: Path,
    target: ModelConfig,
    kind: str = "gemma4",
    seed: int = 7,
    text: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Save a random assistant for a target; returns transformers' own. more, text: keys of its configuration, and of
    that of its layers."""
    _, config, model = KINDS[kind]
    with reading_all():
        layers = text_of(target, kind, **(text or {}))
        own = config(text_config=layers, backbone_hidden_size=target.hidden_size, **more)
        made = model(own).eval()
    randomise(made, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.layer_scalar.copy_(0.5 + torch.rand(1, generator=generator))
        for name, parameter in made.named_parameters():
            if name.endswith(("norm.weight", "_layernorm.weight")):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        if made.masked_embedding is not None:
            made.masked_embedding.token_ordering.copy_(torch.randperm(target.vocab_size, generator=generator))
    made.save_pretrained(directory)
    return made


@torch.inference_mode()
def read_by_transformers(target: Any, tokens: Sequence[int]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """[R, H], the states after the last norm, and the keys and values that an assistant reads, by kind of layer, of a
    whole text."""
    ids = torch.tensor([list(tokens)])
    if target.config.get_text_config().num_kv_shared_layers:
        # As its generation asks for them: with the states of all layers, so that no row is left out.
        found = target.model(input_ids=ids, use_cache=False, return_shared_kv_states=True, output_hidden_states=True)
        return found.last_hidden_state[0], dict(found.shared_kv_states)
    # Without shared layers it keeps none for an assistant: they are taken where its attention reads them.
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    module = import_module(type(target).__module__)
    attends = module.eager_attention_forward

    def seen(layer: Any, query: Tensor, keys: Tensor, values: Tensor, *more: Any, **others: Any) -> Any:
        kept[layer.layer_type] = keys, values
        return attends(layer, query, keys, values, *more, **others)

    target.set_attn_implementation("eager")
    with patch.object(module, "eager_attention_forward", seen):
        return target.model(input_ids=ids, use_cache=False).last_hidden_state[0], kept


@torch.inference_mode()
def drafted(
    assistant: Any,
    target: Any,
    states: Tensor,
    kept: dict[str, tuple[Tensor, Tensor]],
    tokens: Sequence[int],
    below: Sequence[int],
) -> list[Tensor]:
    """fp32[V] below the root and below each further token, by transformers' module as its generation drives it.

    states, kept: of all tokens but the last, the root. below: tokens that are drafted, one below the other.
    """  # fmt: skip
    length = len(tokens) - 1
    window = assistant.config.get_text_config().sliding_window
    own = {
        kind: tuple(
            part[:, :, :length][:, :, -(window - 1) if kind == "sliding_attention" else None :] for part in pair
        )
        for kind, pair in kept.items()
    }
    state, found, embedding = states[None, length - 1 : length], [], target.get_input_embeddings()
    for token in (tokens[-1], *below):
        made = assistant(
            inputs_embeds=torch.cat((embedding(torch.tensor([[token]])), state), dim=-1),
            position_ids=torch.tensor([[length]]),
            shared_kv_states=own,
        )
        found.append(made.logits[0, 0])
        state = made.last_hidden_state
    return found
