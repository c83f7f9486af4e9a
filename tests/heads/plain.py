"""Heads in plain torch, row by row over a whole text: no pages, no cache, nothing shared with what they check.

Written after the papers and the published modelling code, for one text at a time. Weights come by their published
names.
"""

from __future__ import annotations

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
    """An EAGLE head over a text. weights: the layer's names without ``midlayer.``; config: the layer's keys."""

    config: dict[str, Any]
    weights: Weights
    embed: Tensor
    lm_head: Tensor
    generation: int = 3
    flags: dict[str, bool] = field(default_factory=dict)

    def fuse(self, features: list[Tensor]) -> Tensor:
        if self.flags.get("fc_norm"):
            features = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(features)]
        fused = torch.cat(features, dim=-1)
        if self.flags.get("norm_before_fc"):
            fused = self._norm("input_norm", fused)
        return (
            F.linear(fused, self.weights["fc.weight"], self.weights.get("fc.bias")) if self.generation == 3 else fused
        )

    def __call__(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Row i: token i with hidden state i (of the token before it). Logits and states of all rows."""
        embedded = self.embed[tokens]
        if self.generation == 1:
            mixed = F.linear(torch.cat((embedded, hidden), -1), self.weights["fc.weight"], self.weights.get("fc.bias"))
            residual = mixed
        else:
            normed = self._norm("hidden_norm", hidden)
            mixed = torch.cat((self._norm("input_layernorm", embedded), normed), -1)
            residual = normed if self.flags.get("norm_before_residual") else hidden
        x = residual + self._attention(mixed)
        inner = self._norm("post_attention_layernorm", x)
        gate, up = (F.linear(inner, self.weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, self.weights["mlp.down_proj.weight"])
        if self.generation == 1:
            return F.linear(x, self.lm_head), x
        out = self._norm("norm", x)
        return F.linear(out, self.lm_head), out if self.flags.get("norm_output") else x

    def chain(self, tokens: list[int], hidden: Tensor, length: int, ids: Tensor | None = None) -> list[int]:
        """The likeliest continuation, each guess fed back with the state it was made from."""
        text, states = list(tokens), hidden
        for _ in range(length):
            logits, out = self(torch.tensor(text), states)
            best = int(logits[-1].argmax())
            text.append(best if ids is None else int(ids[best]))
            states = torch.cat((states, out[-1:]))
        return text[len(tokens) :]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _attention(self, mixed: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        parts = []
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            key = f"self_attn.{name}_proj"
            rows = F.linear(mixed, self.weights[f"{key}.weight"], self.weights.get(f"{key}.bias"))
            parts.append(rows.view(len(mixed), count, -1).transpose(0, 1))
        query, key_rows, value = parts
        query, key_rows = self._rotate(query), self._rotate(key_rows)
        key_rows, value = (part.repeat_interleave(heads // groups, dim=0) for part in (key_rows, value))
        scores = query @ key_rows.mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        seen = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(mixed), -1)
        return F.linear(seen, self.weights["self_attn.o_proj.weight"], self.weights.get("self_attn.o_proj.bias"))

    def _rotate(self, x: Tensor) -> Tensor:
        """Positions from 0: only distances matter."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
