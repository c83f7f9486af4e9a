"""Medusa heads in training (Medusa-1: the target is frozen).

Head i reads the hidden state at t and learns the target's whole distribution of token t + 2 + i. Blocks start at zero
and output matrices as copies of the target's, so that a new head predicts what the target predicts for token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.training_batch import DepthMetrics, TrainingBatch, evaluate, soft_cross_entropy


class MedusaModel(nn.Module):
    """``count`` heads of one block each. lm_head: [V, H], the target's output matrix, copied."""

    needs = ("final",)

    def __init__(self, lm_head: Tensor, count: int) -> None:
        super().__init__()
        vocab, width = lm_head.shape
        blocks = [nn.Linear(width, width) for _ in range(count)]
        outputs = [nn.Linear(width, vocab, bias=False) for _ in range(count)]
        with torch.no_grad():
            for block, output in zip(blocks, outputs, strict=True):
                block.weight.zero_()
                block.bias.zero_()
                output.weight.copy_(lm_head)
        self.blocks, self.outputs = nn.ModuleList(blocks), nn.ModuleList(outputs)

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """[..., H] -> [..., V]: the guess of head number ``head``."""
        logits: Tensor = self.outputs[head](self._inside(hidden, head))
        return logits

    def _inside(self, hidden: Tensor, head: int) -> Tensor:
        """[..., H] -> [..., H]: the input of the output matrix."""
        inside: Tensor = hidden + functional.silu(self.blocks[head](hidden))
        return inside

    def losses(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """One loss per head; heads share no parameters, so each has its own backward pass."""
        for head, output in enumerate(self.outputs):
            rows = slice(1 + head, batch.tokens.shape[1])
            hidden = self._inside(batch.select(batch.features["final"][:, : -1 - head], rows), head)
            assert isinstance(output.weight, Tensor)
            yield soft_cross_entropy(hidden, output.weight, batch.target_probs(rows)[0])

    @torch.no_grad()
    def evaluate(self, batch: TrainingBatch, generator: torch.Generator) -> list[DepthMetrics]:
        """The quality of each head: its guesses are compared with the target's rows from 1 + head on."""
        found = []
        for head in range(len(self.outputs)):
            rows = slice(1 + head, batch.tokens.shape[1])
            hidden = batch.select(batch.features["final"][:, : -1 - head], rows)
            found.append(evaluate(self(hidden, head), batch.target_logits(rows), generator))
        return found

    def published(self) -> dict[str, Tensor]:
        """The tensors under the authors' names."""
        names = {"blocks": "0.linear", "outputs": "1"}
        stored = {}
        for name, parameter in self.named_parameters():
            part, head, kind = name.split(".")
            stored[f"{head}.{names[part]}.{kind}"] = parameter.detach()
        return stored

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them."""
        return {"medusa_num_heads": len(self.blocks), "medusa_num_layers": 1, "base_model_name_or_path": target}
