"""Heads in plain torch, row by row over a whole text: no pages, no cache, nothing shared with what they check.

Written after the papers and the published modelling code, for one text at a time. Weights come by their published
names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def medusa_logits(weights: Weights, head: int, blocks: int, hidden: Tensor) -> Tensor:
    """The authors' names, without prefix."""
    for block in range(blocks):
        name = f"{head}.{block}.linear"
        hidden = hidden + F.silu(F.linear(hidden, weights[f"{name}.weight"], weights.get(f"{name}.bias")))
    return F.linear(hidden, weights[f"{head}.{blocks}.weight"])


@dataclass
class PlainEagle:
    """An EAGLE head over a text. weights: the first layer's by bare names, those above it as ``layers.1.NAME``;
    config: the layer's keys.
    """

    config: dict[str, Any]
    weights: Weights
    embed: Tensor
    lm_head: Tensor
    generation: int = 3
    layers: int = 1
    flags: dict[str, bool] = field(default_factory=dict)

    def fuse(self, features: list[Tensor]) -> Tensor:
        if self.flags.get("fc_norm"):
            features = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(features)]
        fused = torch.cat(features, dim=-1)
        if self.flags.get("norm_before_fc"):
            fused = self._norm("input_norm", fused)
        mixes = self.generation == 3 and "fc.weight" in self.weights
        return self._linear("fc", fused) if mixes else fused

    def __call__(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Row i: token i with hidden state i (of the token before it). Logits and states of all rows."""
        embedded = self.embed[tokens]
        if self.generation == 1:
            residual = self._linear("fc", torch.cat((self._maybe_norm("embedding_layernorm", embedded), hidden), -1))
            mixed = self._maybe_norm("fused_layernorm", residual)
        else:
            normed = self._norm("hidden_norm", hidden)
            mixed = torch.cat((self._norm("input_layernorm", embedded), normed), -1)
            residual = normed if self.flags.get("norm_before_residual") else hidden
        x = self._layer("", mixed, residual)
        for number in range(1, self.layers):
            name = f"layers.{number}."
            x = self._layer(name, self._norm(f"{name}input_layernorm", x), x)
        if self.generation == 1:
            x = self._maybe_norm("pre_lm_head_layernorm", x)
            return F.linear(x, self.lm_head), x
        out = self._norm("norm", x)
        return F.linear(out, self.lm_head), out if self.flags.get("norm_output") else x

    def _layer(self, name: str, mixed: Tensor, residual: Tensor) -> Tensor:
        x = residual + self._attention(name, mixed)
        inner = self._norm(f"{name}post_attention_layernorm", x)
        gate, up = (self._linear(f"{name}mlp.{part}_proj", inner) for part in ("gate", "up"))
        return x + self._linear(f"{name}mlp.down_proj", F.silu(gate) * up)

    def chain(self, tokens: list[int], hidden: Tensor, length: int, ids: Tensor | None = None) -> list[int]:
        """The likeliest continuation, each guess fed back with the state it was made from."""
        text, states = list(tokens), hidden
        for _ in range(length):
            logits, out = self(torch.tensor(text), states)
            best = int(logits[-1].argmax())
            text.append(best if ids is None else int(ids[best]))
            states = torch.cat((states, out[-1:]))
        return text[len(tokens) :]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _maybe_norm(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x) if f"{name}.weight" in self.weights else x

    def _attention(self, name: str, mixed: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        parts = {}
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            rows = self._linear(f"{name}self_attn.{part}_proj", mixed)
            parts[part] = rows.view(len(mixed), count, -1).transpose(0, 1)
        query, key = (self._rotate(self._maybe_norm(f"{name}self_attn.{part}_norm", parts[part])) for part in "qk")
        key, value = (part.repeat_interleave(heads // groups, dim=0) for part in (key, parts["v"]))
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        seen = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(mixed), -1)
        return self._linear(f"{name}self_attn.o_proj", seen)

    def _rotate(self, x: Tensor) -> Tensor:
        """Positions from 0: only distances matter."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * self._scaled(frequencies)
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _scaled(self, frequencies: Tensor) -> Tensor:
        """As the configuration stretches them: all alike, or (Llama 3) slow ones wholly and fast ones not at all."""
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return frequencies
        if scaling.get("type") == "linear":
            return frequencies / float(scaling["factor"])
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = frequencies * (scaling["original_max_position_embeddings"] / (2 * math.pi))
        kept: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / float(scaling["factor"]))
