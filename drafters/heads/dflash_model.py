"""A DFlash head in training: consecutive blocks cover a text, and each is guessed from what comes before it.

::

    text      x0   x1   x2   x3   x4   x5   x6   x7   x8   x9  ..
    rows                x2   mask mask mask|x6   mask mask mask|..      blocks of four, from position 2 on
    attends   to the target's features before its block's first token, as injected keys; and to all of its own block
    guesses                  x3   x4   x5        x7   x8   x9

Each text is passed over several times, each time with the blocks at another offset.

Legend: B texts, T tokens, R rows of blocks, K rows of one block, H width, V' draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.lesson import Depth, Lesson, judge, soft_cross_entropy, spread, vocabulary
from foresay.drafters.heads.walk import LlamaShape, NormLayer, TrainedLayer

#: How often each text is passed over in a step.
OVERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape(LlamaShape):
    """The shape of a head. layers: the target's layers whose inputs it reads. block_size: K. mask_token_id: the token
    of the rows that guess."""

    draft_vocab_size: int
    num_hidden_layers: int
    layers: tuple[int, ...]
    target_layers: int
    block_size: int
    mask_token_id: int


class DFlashModel(nn.Module):
    """One head. embed: [V, H], the target's, not trained. The output matrix is trained only if the draft vocabulary is
    smaller; else logits are capped as the target's. token_ids: int64[V'], the target's id of each draft id.
    """

    embed: Tensor
    token_ids: Tensor

    def __init__(self, shape: DFlashShape, embed: Tensor, token_ids: Tensor, lm_head: Tensor) -> None:
        super().__init__()
        self.shape, width = shape, shape.hidden_size
        self.needs = tuple(f"layer.{layer}" for layer in shape.layers)
        self.fc = nn.Linear(width * len(shape.layers), width, bias=False)
        shown = shape.described("Qwen3ForCausalLM", shape.num_hidden_layers)
        self.hidden_norm, self.norm = (NormLayer(shown.stack.norm, width) for _ in range(2))
        self.layers = nn.ModuleList(TrainedLayer(node, width, shown.max_positions) for node in shown.stack.layers)
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(self._truncated)
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head[token_ids])
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("token_ids", token_ids)

    def losses(self, lesson: Lesson) -> Iterator[Tensor]:
        """One loss for each pass over the text. A deeper guess counts less, as it is needed less often."""
        (chances, known), size = lesson.chances(slice(None), self.token_ids), self.shape.block_size
        first = int(lesson.tokens.sum()) % size
        weights = [math.exp(-2.0 * depth / size) for depth in range(size - 1)]
        for over in range(min(OVERS, size)):
            total = torch.zeros((), device=lesson.tokens.device)
            for depth, (states, rows) in enumerate(self._guesses(lesson, (first + over * size // OVERS) % size)):
                about = lesson.about(rows)
                counts = None if known is None else known[about]
                cap = None if self._truncated else lesson.cap
                loss = soft_cross_entropy(lesson.taken(states, rows), self.lm_head.weight, chances[about], counts, cap)
                total = total + weights[depth] / sum(weights) / OVERS * loss
            yield total

    @torch.no_grad()
    def judged(self, lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        """The quality of each guess of a block, on the unchanged text."""
        found = []
        for states, rows in self._guesses(lesson, 1):
            target_logits, guessed = lesson.target_logits(rows), self.lm_head(lesson.taken(states, rows))
            guessed = guessed if self._truncated else lesson.capped(guessed)
            found.append(judge(spread(target_logits, self.token_ids, guessed), target_logits, generator))
        return found

    @property
    def _truncated(self) -> bool:
        return self.shape.draft_vocab_size < self.shape.vocab_size

    def _guesses(self, lesson: Lesson, first: int) -> Iterator[tuple[Tensor, slice]]:
        """The states of each guess of the blocks from ``first`` on, [B, R / K, H], and the target's rows they are
        compared with."""
        size, tokens = self.shape.block_size, lesson.tokens
        count = (tokens.shape[1] - first) // size * size
        states = self._states(lesson, first, count)
        for depth in range(1, size):
            yield states[:, depth::size], slice(first + depth - 1, first + count - 1, size)

    def _states(self, lesson: Lesson, first: int, count: int) -> Tensor:
        """[B, R, H]: the states of the ``count`` rows of the blocks from ``first`` on."""
        size, device = self.shape.block_size, lesson.tokens.device
        anchors = torch.arange(count, device=device) // size * size
        roots = torch.arange(count, device=device) % size == 0
        rows = lesson.tokens[:, first : first + count].masked_fill(~roots, self.shape.mask_token_id)
        context = self.hidden_norm(self.fc(torch.cat([lesson.features[name] for name in self.needs], dim=-1)))
        before = torch.arange(lesson.tokens.shape[1], device=device) < first + anchors[:, None]
        seen = torch.cat((before, anchors == anchors[:, None]), dim=1)
        x = functional.embedding(rows, self.embed)
        for layer in self.layers:
            assert isinstance(layer, TrainedLayer)
            mixed = layer.before(x)
            query, *own = layer.heads(mixed, first)
            key, value = (torch.cat(both, dim=2) for both in zip(layer.keys(context), own, strict=True))
            x = layer.finish(x, mixed, layer.attend(query, key, value, seen))
        states: Tensor = self.norm(x)
        return states

    def matrices(self) -> list[nn.Parameter]:
        """The inner matrices, for the Muon optimizer."""
        return [own for name, own in self.named_parameters() if own.ndim == 2 and not name.startswith("lm_head")]

    def published(self) -> dict[str, Tensor]:
        """The tensors under the authors' names; those of a draft vocabulary under speculators' names."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if not self._truncated:
            del tensors["lm_head.weight"]
            return tensors
        return tensors | vocabulary(self.token_ids, self.shape.vocab_size)

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them, in the authors' format. Layers are named by their outputs."""
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
