"""A draft model in training: a small decoder that learns its target's whole distribution, row by row.

Its input is always the true text, so there is one loss over all rows, and its quality is the same at every depth.

Legend: B texts, T rows, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.lesson import Depth, Lesson, judge, soft_cross_entropy
from foresay.drafters.heads.walk import NormLayer, TrainedLayer
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.fields import Fields
from foresay.verifier.ops.rows import finish_logits

#: The standard deviation of an embedding's initial entries.
_EMBEDDED = 0.02


class StudentModel(nn.Module):
    """A decoder of any architecture, as transformers computes it. values: its config.json."""

    needs: tuple[str, ...] = ()

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__()
        self.values, self.shape = values, ModelConfig.of(Fields(values, "the draft model's shape"))
        width, vocab = self.shape.hidden_size, self.shape.vocab_size
        self.embed = nn.Parameter(_EMBEDDED * torch.randn(vocab, width))
        self.layers = nn.ModuleList(
            TrainedLayer(node, width, self.shape.max_positions) for node in self.shape.stack.layers
        )
        self.norm, first = NormLayer(self.shape.stack.norm, width), self.shape.stack.embedding_norm
        self._embedding_norm = None if first is None else NormLayer(first, width)
        self.lm_head = None if self.shape.tie_word_embeddings else nn.Parameter(_EMBEDDED * torch.randn(vocab, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[B, T] -> [B, T, H]: the input of the output matrix."""
        state, scale = functional.embedding(tokens, self.embed), self.shape.stack.embedding_scale
        state = state if scale == 1.0 else state * scale
        state = state if self._embedding_norm is None else self._embedding_norm(state)
        for layer in self.layers:
            state = layer(state)
        hidden: Tensor = self.norm(state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V], without gradients."""
        stack = self.shape.stack
        return finish_logits(hidden @ self._output.T, stack.logit_scale, stack.logit_cap)

    @property
    def _output(self) -> Tensor:
        return self.embed if self.lm_head is None else self.lm_head

    def losses(self, lesson: Lesson) -> Iterator[Tensor]:
        """One loss, over all rows."""
        rows, stack = slice(None), self.shape.stack
        hidden = lesson.taken(self(lesson.tokens), rows)
        hidden = hidden if stack.logit_scale == 1.0 else hidden * stack.logit_scale
        yield soft_cross_entropy(hidden, self._output, lesson.chances(rows)[0], cap=stack.logit_cap)

    @torch.no_grad()
    def judged(self, lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        """Its quality, the same at any depth."""
        rows = slice(None)
        hidden = lesson.taken(self(lesson.tokens), rows)
        return [judge(self.logits(hidden), lesson.target_logits(rows), generator)]

    def published(self) -> dict[str, Tensor]:
        """The tensors under transformers' names."""
        names = {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
        return {names.get(name, f"model.{name}"): parameter.detach() for name, parameter in self.named_parameters()}

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them."""
        return {**self.values, "target_model": target}
