"""A draft model that learns: a small Llama which learns its target's whole distribution, row by row.

It sees the true text wherever it is asked, so one loss over all rows is the whole lesson, and how it does is the same
at every depth.

Legend: B texts, T rows, H width, N heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.lesson import Depth, Lesson, judge
from foresay.drafters.heads.llama import LlamaShape
from foresay.drafters.heads.loss import soft_cross_entropy

#: The deviation of an embedding's entries at the start.
_EMBEDDED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape(LlamaShape):
    """The shape of a draft model."""

    num_hidden_layers: int


class DraftModel(nn.Module):
    """A Llama with input and output embedding in one, as transformers computes it."""

    needs: tuple[str, ...] = ()

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(_EMBEDDED * torch.randn(shape.vocab_size, shape.hidden_size))
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[B, T] -> [B, T, H]: what the output matrix reads."""
        state = functional.embedding(tokens, self.embed)
        for layer in self.layers:
            state = layer(state)
        hidden: Tensor = self.norm(state)
        return hidden

    def losses(self, lesson: Lesson) -> Iterator[Tensor]:
        """One loss, over all rows."""
        rows = slice(None)
        yield soft_cross_entropy(lesson.taken(self(lesson.tokens), rows), self.embed, lesson.chances(rows)[0])

    @torch.no_grad()
    def judged(self, lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        """How it does at any depth."""
        rows = slice(None)
        hidden = lesson.taken(self(lesson.tokens), rows)
        return [judge(hidden @ self.embed.T, lesson.wanted(rows), generator)]

    def published(self) -> dict[str, Tensor]:
        """The tensors by transformers' names."""
        parts = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
        parts |= {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
        tensors = {"model.embed_tokens.weight": self.embed.detach(), "model.norm.weight": self.norm.weight.detach()}
        for name, parameter in self.layers.named_parameters():
            number, module, kind = name.split(".")
            inside = f"{parts[module]}.{module}" if module in parts else module
            tensors[f"model.layers.{number}.{inside}.{kind}"] = parameter.detach()
        return tensors

    def config(self, target: str) -> dict[str, object]:
        """The config.json beside them."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: value for key, value in asdict(self.shape).items() if key != "rope_theta"},
            "rope_parameters": {"rope_theta": self.shape.rope_theta, "rope_type": "default"},
            "rope_theta": self.shape.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "target_model": target,
        }


class _Layer(nn.Module):
    """One decoder layer, by the names its tensors are published under."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        width, inner = shape.hidden_size, shape.intermediate_size
        query, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(width, eps=shape.rms_norm_eps) for _ in range(2)
        )
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, bias=False) for size in (query, keys, keys))
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.o_proj, self.down_proj = (nn.Linear(size, width, bias=False) for size in (query, inner))

    def forward(self, state: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        state = state + self.o_proj(self._attend(self.input_layernorm(state)))
        inner = self.post_attention_layernorm(state)
        out: Tensor = state + self.down_proj(functional.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        heads, group = self.shape.heads, self.shape.group
        query, key = (self.shape.turned(heads(project(x))) for project in (self.q_proj, self.k_proj))
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, heads(self.v_proj(x))))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).flatten(2)
