"""A DFlash head that learns: blocks lie side by side over a text, each guessed from what comes before it.

::

    text      x0   x1   x2   x3   x4   x5   x6   x7   x8   x9  ..
    rows                x2   mask mask mask|x6   mask mask mask|..      blocks of four, from position 2 on
    sees      the target's features before its block's first token, as injected keys; and all of its own block
    guesses                  x3   x4   x5        x7   x8   x9

A text is gone over several times, its blocks begun elsewhere each time.

Legend: B texts, T tokens, R rows of blocks, K rows of one block, H width, Q query heads, G kv heads, D head dim, V'
draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.lesson import Depth, Lesson, judge, spread, vocabulary
from foresay.drafters.heads.llama import LlamaShape
from foresay.drafters.heads.loss import soft_cross_entropy

#: How often a text is gone over in a step.
OVERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape(LlamaShape):
    """The shape of a head. layers: the target's layers whose inputs it reads. block_size: K. mask_token_id: of the rows
    that guess."""

    draft_vocab_size: int
    num_hidden_layers: int
    layers: tuple[int, ...]
    target_layers: int
    block_size: int
    mask_token_id: int


class DFlashModel(nn.Module):
    """One head. embed: [V, H], the target's, not trained, as its output matrix is not unless the draft vocabulary is
    smaller. token_ids: int64[V'], the target's id of each draft id.
    """

    embed: Tensor
    token_ids: Tensor

    def __init__(self, shape: DFlashShape, embed: Tensor, token_ids: Tensor, lm_head: Tensor) -> None:
        super().__init__()
        self.shape, width = shape, shape.hidden_size
        self.needs = tuple(f"layer.{layer}" for layer in shape.layers)
        self.fc = nn.Linear(width * len(shape.layers), width, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(width, eps=shape.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(self._truncated)
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head[token_ids])
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("token_ids", token_ids)

    def losses(self, lesson: Lesson) -> Iterator[Tensor]:
        """One loss for each time the text is gone over. A deeper guess counts less, as it is seldomer needed."""
        (chances, known), size = lesson.chances(slice(None), self.token_ids), self.shape.block_size
        first = int(lesson.tokens.sum()) % size
        weights = [math.exp(-2.0 * depth / size) for depth in range(size - 1)]
        for over in range(min(OVERS, size)):
            total = torch.zeros((), device=lesson.tokens.device)
            for depth, (states, rows) in enumerate(self._guesses(lesson, (first + over * size // OVERS) % size)):
                about = lesson.about(rows)
                counts = None if known is None else known[about]
                loss = soft_cross_entropy(lesson.taken(states, rows), self.lm_head.weight, chances[about], counts)
                total = total + weights[depth] / sum(weights) / OVERS * loss
            yield total

    @torch.no_grad()
    def judged(self, lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        """How each guess of a block does, of the text as it came."""
        found = []
        for states, rows in self._guesses(lesson, 1):
            wanted, guessed = lesson.wanted(rows), self.lm_head(lesson.taken(states, rows))
            found.append(judge(spread(wanted, self.token_ids, guessed), wanted, generator))
        return found

    @property
    def _truncated(self) -> bool:
        return self.shape.draft_vocab_size < self.shape.vocab_size

    def _guesses(self, lesson: Lesson, first: int) -> Iterator[tuple[Tensor, slice]]:
        """What each guess of the blocks from ``first`` on is made of, [B, R / K, H], and the target's rows about it."""
        size, tokens = self.shape.block_size, lesson.tokens
        count = (tokens.shape[1] - first) // size * size
        states = self._states(lesson, first, count)
        for depth in range(1, size):
            yield states[:, depth::size], slice(first + depth - 1, first + count - 1, size)

    def _states(self, lesson: Lesson, first: int, count: int) -> Tensor:
        """[B, R, H]: of the ``count`` rows of the blocks from ``first`` on."""
        size, device = self.shape.block_size, lesson.tokens.device
        anchors = torch.arange(count, device=device) // size * size
        roots = torch.arange(count, device=device) % size == 0
        rows = lesson.tokens[:, first : first + count].masked_fill(~roots, self.shape.mask_token_id)
        context = self.hidden_norm(self.fc(torch.cat([lesson.features[name] for name in self.needs], dim=-1)).float())
        before = torch.arange(lesson.tokens.shape[1], device=device) < first + anchors[:, None]
        seen = torch.cat((before, anchors == anchors[:, None]), dim=1)
        x = functional.embedding(rows, self.embed)
        for layer in self.layers:
            x = layer(x, context, first, seen)
        states: Tensor = self.norm(x)
        return states

    def matrices(self) -> list[nn.Parameter]:
        """Those inside, which attention has to be found by."""
        return [own for name, own in self.named_parameters() if own.ndim == 2 and not name.startswith("lm_head")]

    def published(self) -> dict[str, Tensor]:
        """The tensors by the authors' names, those of a draft vocabulary by speculators'."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if not self._truncated:
            del tensors["lm_head.weight"]
            return tensors
        return tensors | vocabulary(self.token_ids, self.shape.vocab_size)

    def config(self, target: str) -> dict[str, object]:
        """The config.json beside them, as the authors write it. Layers are named by their outputs."""
        shape = asdict(self.shape)
        layers, mask = [layer - 1 for layer in shape.pop("layers")], shape.pop("mask_token_id")
        if not self._truncated:
            del shape["draft_vocab_size"]
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_target_layers": shape.pop("target_layers"),
            **shape,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "target_model": target,
            "dflash_config": {"target_layer_ids": layers, "mask_token_id": mask},
        }


class _Layer(nn.Module):
    """One layer, its parts by the names that are published."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.self_attn, self.mlp = _Attention(shape), _Inner(width, shape.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(width, eps=shape.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, context: Tensor, first: int, seen: Tensor) -> Tensor:
        """[B, R, H]. context: [B, T, H], injected. first: the first row's position. seen: bool[R, T + R]."""
        x = x + self.self_attn(self.input_layernorm(x), context, first, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Inner(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(width, inner),
            _linear(width, inner),
            _linear(inner, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self._shape, width, dim = shape, shape.hidden_size, shape.head_dim
        query, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
        self.q_proj, self.k_proj, self.v_proj = (_linear(width, size) for size in (query, keys, keys))
        self.o_proj = _linear(query, width)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps=shape.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, first: int, seen: Tensor) -> Tensor:
        shape = self._shape
        query = shape.turned(self.q_norm(shape.heads(self.q_proj(x)).float()), first)
        keys = [self.k_norm(shape.heads(self.k_proj(part)).float()) for part in (context, x)]
        key = torch.cat((shape.turned(keys[0]), shape.turned(keys[1], first)), dim=2)
        value = torch.cat([shape.heads(self.v_proj(part)) for part in (context, x)], dim=2)
        key, value = (part.repeat_interleave(shape.group, dim=1).to(value.dtype) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query.to(value.dtype), key, value, attn_mask=seen)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
