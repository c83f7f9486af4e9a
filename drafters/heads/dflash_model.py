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
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foresay.drafters.heads.stack import HeadModel, HeadShape, Texts
from foresay.drafters.heads.training_batch import TrainingBatch, soft_cross_entropy
from foresay.verifier.heads.config import HeadConfig, with_layers
from foresay.verifier.heads.paged import DFlashHead
from foresay.verifier.model.layers import Attention
from foresay.verifier.ops.eager import references

#: How often each text is passed over in a step.
OVERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape(HeadShape):
    """The shape of a head. block_size: K. mask_token_id: the token of the rows that guess."""

    num_hidden_layers: int
    target_layers: int
    block_size: int
    mask_token_id: int


class _Blocks(Texts):
    """Rows attend to the injected keys before their block, and to all of the block. seen: bool[R, T + R]."""

    seen: Tensor

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, node: Attention, sinks: Tensor | None) -> Tensor:
        """[B R, Q D]."""
        pairs = zip(self.kept[self.number][0], (keys[: len(query)], values[: len(query)]), strict=True)
        keys, values = (torch.cat([self.heads(one, node) for one in each], dim=2) for each in pairs)
        return self.attend(query, (keys, values), node, sinks, self.seen)


class DFlashModel(HeadModel[DFlashHead]):
    """A DFlash head. The output matrix is trained only if the draft vocabulary is smaller; else logits are capped as
    the target's."""

    serves = DFlashHead

    def __init__(self, shape: DFlashShape, embed: Tensor, token_ids: Tensor, lm_head: Tensor) -> None:
        shown = shape.described("Qwen3ForCausalLM", shape.num_hidden_layers)
        nodes = [replace(one, mixer=replace(one.attention, causal=False)) for one in shown.stack.layers]
        names = tuple(f"layer.{layer}" for layer in shape.layers)
        config = HeadConfig(
            layer=with_layers(shown, nodes),
            draft_vocab=shape.draft_vocab_size,
            names=names,
            generation=0,
            mask=shape.mask_token_id,
            guesses=shape.block_size - 1,
        )
        super().__init__(config, embed, token_ids, lm_head)
        self.shape = shape
        self.lm_head.weight.requires_grad_(self.truncated)

    def losses(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """One loss for each pass over the text. A deeper guess counts less, as it is needed less often."""
        (chances, known), size = batch.target_probs(slice(None), self.token_ids), self.shape.block_size
        first = int(batch.tokens.sum()) % size
        weights = [math.exp(-2.0 * depth / size) for depth in range(size - 1)]
        for over in range(min(OVERS, size)):
            total = torch.zeros((), device=batch.tokens.device)
            for depth, (states, rows) in enumerate(self._guesses(batch, (first + over * size // OVERS) % size)):
                about = batch.row_indices(rows)
                counts = None if known is None else known[about]
                cap = None if self.truncated else batch.logit_cap
                loss = soft_cross_entropy(batch.select(states, rows), self.lm_head.weight, chances[about], counts, cap)
                total = total + weights[depth] / sum(weights) / OVERS * loss
            yield total

    def guesses(self, batch: TrainingBatch) -> Iterator[tuple[Tensor, slice]]:
        """Those of each place in a block, on the unchanged text."""
        return self._guesses(batch, 1)

    def logits(self, batch: TrainingBatch, states: Tensor) -> Tensor:
        """Capped as the target's if the output matrix is."""
        found = super().logits(batch, states)
        return found if self.truncated else batch.cap_logits(found)

    def _guesses(self, batch: TrainingBatch, first: int) -> Iterator[tuple[Tensor, slice]]:
        """The states of each guess of the blocks from ``first`` on, [B, R / K, H], and the target's rows they are
        compared with."""
        size, tokens = self.shape.block_size, batch.tokens
        count = (tokens.shape[1] - first) // size * size
        with references():
            states = self._states(batch, first, count)
        for depth in range(1, size):
            yield states[:, depth::size], slice(first + depth - 1, first + count - 1, size)

    def _states(self, batch: TrainingBatch, first: int, count: int) -> Tensor:
        """[B, R, H]: the states of the ``count`` rows of the blocks from ``first`` on."""
        (texts, length), size, device = batch.tokens.shape, self.shape.block_size, batch.tokens.device
        anchors, head = torch.arange(count, device=device) // size * size, self.served(length)
        roots = torch.arange(count, device=device) % size == 0
        rows = batch.tokens[:, first : first + count].masked_fill(~roots, self.shape.mask_token_id)
        before = torch.arange(length, device=device) < first + anchors[:, None]
        store: Any = _Blocks(self.described, texts, texts * length, device)
        store.seen = torch.cat((before, anchors == anchors[:, None]), dim=1)
        whole, features = store.rows(batch.tokens), {name: batch.features[name].flatten(0, 1) for name in self.needs}
        head.inject(features, whole.positions, whole.slots, store)
        states: Tensor = head.run_rows(store.rows(rows, first), store)[0].unflatten(0, (texts, count))
        return states

    def matrices(self) -> list[nn.Parameter]:
        """The inner matrices, for the Muon optimizer."""
        return [own for name, own in self.named_parameters() if own.ndim == 2 and not name.startswith("lm_head")]

    def published(self) -> dict[str, Tensor]:
        """The tensors under the authors' names; those of a draft vocabulary under speculators' names."""
        tensors = super().published()
        if not self.truncated:
            del tensors["lm_head.weight"]
        return tensors

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them, in the authors' format. Layers are named by their outputs."""
        shape = asdict(self.shape)
        layers, mask = [layer - 1 for layer in shape.pop("layers")], shape.pop("mask_token_id")
        if not self.truncated:
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
