"""DFlash and DSpark heads: in plain torch, written after the authors' modelling code, and random ones by layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foresay.verifier.model.decoder import Decoder
from tests.heads.plain import Weights, norm
from tests.heads.writing import noise, output_matrix, write_config, write_weights

#: The authors' layout, speculators', speculators' with causal sliding layers, and transformers'.
DFLASH = ["authors", "speculators", "sliding", "transformers"]
#: DSpark's: DeepSpec's layout, then speculators'.
DSPARK = {"deepspec": "vanilla", "gated": "gated", "rnn": "rnn"}
RANK = 8
MASK, BLOCK, LAYERS = 7, 6, 2


@dataclass
class PlainDFlash:
    """A head over a text, for one block at a time, nothing cached. config: the layers' keys."""

    config: dict[str, Any]
    weights: Weights
    embed: Tensor
    lm_head: Tensor
    anchored: bool = False
    causal: bool = False
    mask: int = MASK

    def __call__(self, features: Tensor, root: int, block: int = BLOCK) -> Tensor:
        """Logits of the rows that guess, behind a text whose features are [R, F]."""
        return F.linear(self._states(features, root, block), self.lm_head)

    def below(self, features: Tensor, path: list[int], kind: str) -> Tensor:
        """DSpark's logits below each token of a path, the root first."""
        states, made = self._states(features, path[0], BLOCK), []
        state = torch.zeros(RANK)
        for hidden, token in zip(states, path, strict=False):
            before = self.weights["markov_head.markov_w1.weight"][token]
            if kind == "gated":
                before = before * self._biased("gate_proj", hidden, before).sigmoid()
            elif kind == "rnn":
                gate, candidate, out = self._biased("joint_proj", state, before, hidden).chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                before = out.tanh()
            bias = F.linear(before, self.weights["markov_head.markov_w2.weight"])
            made.append(F.linear(hidden, self.lm_head) + bias)
        return torch.stack(made)

    def _biased(self, name: str, *parts: Tensor) -> Tensor:
        name = f"markov_head.{name}"
        return F.linear(torch.cat(parts), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _states(self, features: Tensor, root: int, block: int) -> Tensor:
        count = len(features)
        context = self._norm("hidden_norm", F.linear(features, self.weights["fc.weight"]))
        x = self.embed[torch.tensor([root, *[self.mask] * (block - 1)])]
        hides = torch.zeros(block, count + block, dtype=torch.bool)
        if self.causal:
            hides[:, count:] = torch.ones(block, block, dtype=torch.bool).triu(1)
        for number in range(self.config["num_hidden_layers"]):
            name = f"layers.{number}."
            x = x + self._attention(name, context, self._norm(f"{name}input_layernorm", x), hides)
            inner = self._norm(f"{name}post_attention_layernorm", x)
            gate, up = (self._linear(f"{name}mlp.{part}_proj", inner) for part in ("gate", "up"))
            x = x + self._linear(f"{name}mlp.down_proj", F.silu(gate) * up)
        return self._norm("norm", x)[0 if self.anchored else 1 :]

    def _attention(self, name: str, context: Tensor, x: Tensor, hides: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        both, count = torch.cat((context, x)), len(context)
        query = self._norm(f"{name}self_attn.q_norm", self._heads(f"{name}self_attn.q_proj", x, heads))
        key = self._norm(f"{name}self_attn.k_norm", self._heads(f"{name}self_attn.k_proj", both, groups))
        value = self._heads(f"{name}self_attn.v_proj", both, groups)
        query, key = self._rotate(query, count), self._rotate(key, 0)
        key, value = (part.repeat_interleave(heads // groups, dim=0) for part in (key, value))
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hides, -torch.inf)
        seen = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(x), -1)
        return self._linear(f"{name}self_attn.o_proj", seen)

    def _heads(self, name: str, x: Tensor, count: int) -> Tensor:
        return self._linear(name, x).view(len(x), count, -1).transpose(0, 1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(first, first + x.shape[1])[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def make_dflash(directory: Path, target: Decoder, layout: str = "authors", block: int = BLOCK) -> PlainDFlash:
    """Write a random head; returns the same in plain torch."""
    generator = torch.Generator().manual_seed(13)
    vocab, width, depth = target.config.vocab_size, target.config.hidden_size, target.config.num_layers
    layer = {
        "model_type": "qwen3", "vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "num_hidden_layers": LAYERS,
    }  # fmt: skip
    inputs = [1, depth - 1]
    weights = random_weights(generator, layer, len(inputs))
    stored, lm_head = dict(weights), output_matrix(target)
    if layout in ("speculators", "sliding", "gated", "rnn"):
        ids = torch.randperm(vocab, generator=generator)[: vocab // 2].sort().values
        stored |= {"d2t": ids - torch.arange(len(ids)), "lm_head.weight": lm_head[ids]}
        stored["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        lm_head = lm_head[ids]
    if layout in DSPARK:
        weights |= _markov(generator, DSPARK[layout], vocab, len(lm_head), width)
        stored |= weights | {
            "confidence_head.proj.weight": torch.ones(1, width),
            "confidence_head.proj.bias": torch.ones(1),
        }
    if layout == "transformers":
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        stored = {names.get(name, name): tensor for name, tensor in stored.items()}
    write_config(directory, _config(layout, layer, inputs, block, depth, len(lm_head)))
    write_weights(directory, stored, "model.safetensors")
    return PlainDFlash(
        layer, weights, target.embedding, lm_head, layout == "sliding" or layout in DSPARK, layout == "sliding"
    )


def _markov(generator: torch.Generator, kind: str, vocab: int, draft: int, width: int) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (vocab, RANK), "markov_w2.weight": (draft, RANK)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, width + RANK), "gate_proj.bias": (RANK,)}
    elif kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * RANK, width + 2 * RANK), "joint_proj.bias": (3 * RANK,)}
    return {f"markov_head.{name}": noise(generator, *shape, scale=3.0) for name, shape in shapes.items()}


def random_weights(generator: torch.Generator, layer: dict[str, Any], features: int) -> Weights:
    width, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    shapes = {
        "self_attn.q_proj": (4 * dim, width), "self_attn.k_proj": (2 * dim, width),
        "self_attn.v_proj": (2 * dim, width), "self_attn.o_proj": (width, 4 * dim),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
    }  # fmt: skip
    norms = {"input_layernorm": width, "post_attention_layernorm": width, "self_attn.q_norm": dim}
    norms["self_attn.k_norm"] = dim
    weights = {"fc.weight": noise(generator, width, features * width, scale=1.5)}
    sizes = {"hidden_norm": width, "norm": width}
    for number in range(layer["num_hidden_layers"]):
        for name, shape in shapes.items():
            weights[f"layers.{number}.{name}.weight"] = noise(generator, *shape, scale=1.5)
        sizes |= {f"layers.{number}.{name}": size for name, size in norms.items()}
    for name, size in sizes.items():
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    return weights


def _config(
    layout: str, layer: dict[str, Any], inputs: list[int], block: int, depth: int, draft: int
) -> dict[str, Any]:
    outputs = [number - 1 for number in inputs]
    if layout == "authors":
        own = {"target_layer_ids": outputs, "mask_token_id": MASK}
        named = {"architectures": ["DFlashDraftModel"], "block_size": block, "num_target_layers": depth}
        return {**layer, **named, "dflash_config": own}
    if layout == "deepspec":
        named = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": outputs, "markov_rank": RANK}
        return {**layer, **named, "mask_token_id": MASK, "block_size": block, "num_target_layers": depth}
    if layout == "transformers":
        named = {"model_type": "muse_glimmer_assistant", "target_layer_ids": outputs, "sliding_window": 2048}
        return {**layer, **named, "mask_token_id": MASK, "block_size": block}
    if layout == "sliding":
        layer = {**layer, "layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 400}
    kind = {"speculators_model_type": "dflash", "sample_from_anchor": layout == "sliding"}
    if layout in DSPARK:
        kind = {"speculators_model_type": "dspark", "markov_rank": RANK, "markov_head_type": DSPARK[layout]}
    return {
        **kind, "architectures": ["DFlashSpeculator"], "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": inputs, "mask_token_id": MASK, "block_size": block, "draft_vocab_size": draft,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "t", "architectures": []}},
    }  # fmt: skip
