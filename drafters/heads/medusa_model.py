"""Medusa heads that learn (Medusa-1: the target stays as it is).

Head i reads the hidden state at t and learns the target's whole distribution of token t + 2 + i. Blocks begin at zero
and output matrices as copies of the target's, so that a fresh head says what the target said one token earlier.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.heads.lesson import Depth, Lesson, judge, mean, soft_cross_entropy


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
        logits: Tensor = self.outputs[head](hidden + functional.silu(self.blocks[head](hidden)))
        return logits

    def losses(self, lesson: Lesson) -> Iterator[Tensor]:
        """One loss per head; they share nothing, so each can go backward by itself."""
        chances = lesson.logits.float().softmax(dim=-1)
        for head in range(len(self.blocks)):
            losses = soft_cross_entropy(self._guesses(lesson, head).float(), chances[:, 1 + head :])
            yield mean(losses, lesson.counts[:, 1 + head :])

    @torch.no_grad()
    def judged(self, lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        """How each head does."""
        found = []
        for head in range(len(self.blocks)):
            rows = slice(1 + head, None)
            found.append(judge(self._guesses(lesson, head), lesson.logits[:, rows], lesson.counts[:, rows], generator))
        return found

    def _guesses(self, lesson: Lesson, head: int) -> Tensor:
        """[B, T - 1 - head, V]: about the tokens whose target rows begin at 1 + head."""
        return self.forward(lesson.features["final"][:, : -1 - head], head)

    def published(self) -> dict[str, Tensor]:
        """The tensors by the authors' names."""
        names = {"blocks": "0.linear", "outputs": "1"}
        stored = {}
        for name, parameter in self.named_parameters():
            part, head, kind = name.split(".")
            stored[f"{head}.{names[part]}.{kind}"] = parameter.detach()
        return stored

    def config(self, target: str) -> dict[str, object]:
        """The config.json beside them."""
        return {"medusa_num_heads": len(self.blocks), "medusa_num_layers": 1, "base_model_name_or_path": target}
