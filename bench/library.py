"""A decoder's weights under torch's own ops and under transformers, shared without a copy.

:class:`Library` is what an engine of library kernels replays for each token at batch 1: a product for each matrix,
norms, rotation and attention over contiguous keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.model.config import FINAL_NORM
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.nodes import BEFORE
from foresay.verifier.model.products import DOWN, GATE_UP, OUTPUT, QKV
from foresay.verifier.model.weights import LayerWeights, ModelWeights, destinations


def weights_of(decoder: Decoder) -> ModelWeights:
    """The weights of a decoder without biases; on a GPU the very tensors that are served."""
    layers = []
    for one in decoder.layers:
        products = {QKV: one.qkv, OUTPUT: one.output, **dict(zip((GATE_UP, DOWN), one.inner, strict=True))}
        assert one.before_attention and one.before_mlp, "Llama's norms"
        norms = {BEFORE.before_attention: one.before_attention.weight, BEFORE.before_mlp: one.before_mlp.weight}
        if one.of_heads is not None:
            norms |= {"self_attn.q_norm": one.of_heads.query, "self_attn.k_norm": one.of_heads.key}
        vectors = {f"{name}.weight": weight for name, weight in norms.items()}
        layers.append(LayerWeights({name: each._packed.plain() for name, each in products.items()}, {}, vectors))
    final = {f"{FINAL_NORM}.weight": decoder.final_norm.weight}
    return ModelWeights(decoder.embedding, layers, final, decoder.head._packed.plain())


class Library:
    """A decoder's step of one token by torch's own ops, after ``context`` tokens whose keys and values are random."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        c, device = decoder.config, decoder.device
        self.config, self.at = c, context
        self.weights: Any = weights_of(decoder)  # only tensors
        self.kept = torch.randn(c.num_layers, 2, 1, c.num_kv_heads, context + 1, c.head_dim, device=device).to(
            decoder.dtype
        )
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.rotation = decoder.rope.rows(torch.full((1,), context, device=device))  # looked up once for all layers

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """The step; the next token replaces this one."""
        x = functional.embedding(self.token, self.weights.embed)
        for layer, (keys, values) in zip(self.weights.layers, self.kept, strict=True):
            of, before = layer.matrices, layer.vectors[f"{BEFORE.before_attention}.weight"]
            mixed = self._attended(functional.linear(self._normed(x, before), of[QKV]), keys, values)
            x = x + functional.linear(mixed, of[OUTPUT])
            gate, up = functional.linear(
                self._normed(x, layer.vectors[f"{BEFORE.before_mlp}.weight"]), of[GATE_UP]
            ).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, of[DOWN])
        logits = functional.linear(
            self._normed(x, self.weights.final_norm[f"{FINAL_NORM}.weight"]), self.weights.lm_head
        )
        self.token.copy_(logits.argmax(-1))
        return logits

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (len(weight),), weight, self.config.rms_norm_eps)

    def _attended(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (cos, sin, _), groups, at = (self.rotation, self.config.num_kv_heads, slice(self.at, self.at + 1))
        turned, value = qkv.view(1, -1, 1, self.config.head_dim).split_with_sizes(
            (self.config.num_heads + groups, groups), 1
        )
        first, second = turned.chunk(2, dim=-1)
        turned = torch.addcmul(turned * cos, torch.cat((second, first), -1), sin)
        query, key = turned.split_with_sizes((self.config.num_heads, groups), 1)
        keys[:, :, at].copy_(key)
        values[:, :, at].copy_(value)
        return functional.scaled_dot_product_attention(
            query, keys[:, :, : self.at + 1], values[:, :, : self.at + 1], enable_gqa=groups < self.config.num_heads
        ).reshape(1, -1)

    @torch.inference_mode()
    def products(self) -> None:
        """Only its products, each weight once."""
        layers = [list(layer.matrices.values()) for layer in self.weights.layers]
        for weight in (*(each for layer in layers for each in layer), self.weights.lm_head):
            functional.linear(weight[:1], weight)


def of_transformers(decoder: Decoder) -> Any:
    """A model of transformers whose weights are views of the decoder's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = decoder.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tie_word_embeddings, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype=decoder.dtype,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(dict(destinations(c, weights_of(decoder))), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(decoder.device)  # of no checkpoint
    return model.eval()
