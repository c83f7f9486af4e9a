"""A draft model in training: a small decoder that learns its target's whole distribution, row by row.

Its input is always the true text, so there is one loss over all rows, and its quality is the same at every depth.

Legend: B texts, T rows, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from foresay.drafters.heads.stack import Texts, TrainedStack
from foresay.drafters.heads.training_batch import DepthMetrics, TrainingBatch, evaluate, soft_cross_entropy
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder, Packed
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.forward import run_layers
from foresay.verifier.model.weights import EMBEDDING, LM_HEAD
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.rows import finish_logits


class StudentModel(TrainedStack):
    """A decoder of any architecture. values: its config.json."""

    needs: tuple[str, ...] = ()

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values, self.shape = values, ModelConfig.read(Fields(values, "the draft model's shape"))
        super().__init__(self.shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[B, T] -> [B, T, H]: the input of the output matrix."""
        store: Any = Texts(self.shape, len(tokens), tokens.numel(), tokens.device)
        with references():
            decoder = Decoder(self.shape, Packed.pack(self.shape, self.weights()), tokens.shape[1])
            hidden: Tensor = run_layers(decoder, store.rows(tokens), store)[0].unflatten(0, tokens.shape)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V], without gradients."""
        stack = self.shape.stack
        return finish_logits(hidden @ self._output.T, stack.logit_scale, stack.logit_cap)

    @property
    def _output(self) -> Tensor:
        return self.get_parameter(EMBEDDING if self.shape.tie_word_embeddings else LM_HEAD)

    def losses(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """One loss, over all rows."""
        rows, stack = slice(None), self.shape.stack
        hidden = batch.select(self(batch.tokens), rows)
        hidden = hidden if stack.logit_scale == 1.0 else hidden * stack.logit_scale
        yield soft_cross_entropy(hidden, self._output, batch.target_probs(rows)[0], cap=stack.logit_cap)

    @torch.no_grad()
    def evaluate(self, batch: TrainingBatch, generator: torch.Generator) -> list[DepthMetrics]:
        """Its quality, the same at any depth."""
        rows = slice(None)
        hidden = batch.select(self(batch.tokens), rows)
        return [evaluate(self.logits(hidden), batch.target_logits(rows), generator)]

    def published(self) -> dict[str, Tensor]:
        """The tensors under transformers' names."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them."""
        return {**self.values, "target_model": target}
