"""An EAGLE-3 head in training, with training-time test: it is trained on its own states, as it is run on them.

::

    pass 1    row t: feature t of the target, token t + 1        guesses token t + 2
    pass j    row t: its own state of pass j - 1, token t + j    guesses token t + j + 1
              attends to the rows of pass 1 up to t, and those of passes 2 .. j at t: its own chain

A P-EAGLE head's passes after the first have masks instead of its own states and the text, so that all of them can run
at once::

    pass j    row t: the learnt feature, the mask's token        guesses token t + j + 1
              attends to the rows of pass 1 up to t, and the masks of passes 2 .. j at t

As in speculators (``speculators/models/peagle``), which samples the rows of each pass at random; here every pass has
all rows.

Legend: B texts, T rows, H head width, V' draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from foresay.drafters.heads.stack import HeadModel, HeadShape, Texts
from foresay.drafters.heads.training_batch import TrainingBatch, soft_cross_entropy
from foresay.verifier.heads.config import HeadConfig, continued
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.model.layers import Attention
from foresay.verifier.ops.eager import references

#: The weight of each pass relative to the one before.
DECAY = 0.8
#: The share of a run with only the first pass, and the share in which the others are added one by one.
FIRST_ALONE, ADDED_IN = 0.6, 0.2


class EagleShape(HeadShape):
    """The shape of an EAGLE-3 head."""


class _Chains(Texts):
    """Rows of later passes attend to those of the first pass up to theirs, and to their own chain."""

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, node: Attention, sinks: Tensor | None) -> Tensor:
        """[B T, Q D]."""
        (first, values), *chain = self.kept[self.number]
        if not chain:
            return super().attention(query, first, values, node, sinks)
        own, keys, values = self.heads(query, node) * node.scale, self.heads(first, node), self.heads(values, node)
        scores = own @ keys.mT
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        each = [(own * self.heads(key, node)).sum(dim=-1, keepdim=True) for key, _ in chain]
        weights = torch.cat([scores, *each], dim=-1).float().softmax(dim=-1).to(values.dtype)
        rows = scores.shape[-1]
        total: Tensor = weights[..., :rows] @ values
        for index, (_, value) in enumerate(chain):
            total = total + weights[..., rows + index : rows + index + 1] * self.heads(value, node)
        return total.transpose(1, 2).flatten(2).flatten(0, 1)


class EagleModel(HeadModel[EagleHead]):
    """An EAGLE-3 head. passes: how deep it is trained."""

    serves = EagleHead

    def __init__(
        self,
        shape: EagleShape,
        embed: Tensor,
        token_ids: Tensor,
        lm_head: Tensor,
        passes: int = 6,
        mask: int | None = None,
    ) -> None:
        names = tuple(f"layer.{layer}" for layer in shape.layers)
        layer = continued(shape.described("LlamaForCausalLM"), generation=3)
        config = HeadConfig(layer=layer, draft_vocab=shape.draft_vocab_size, names=names, mask=mask)
        super().__init__(config, embed, token_ids, lm_head)
        self.shape, self.passes = shape, passes

    def losses(self, batch: TrainingBatch, done: float = 1.0) -> Iterator[Tensor]:
        """One loss: later passes count less, rows whose likeliest token is not a draft token do not count.

        done: the completed share of the run. Later passes are only trained towards its end: a head learns mostly from
        the first pass, which costs a fraction of them all.
        """
        chances, known = batch.target_probs(slice(None), self.token_ids)
        total = torch.zeros((), device=batch.tokens.device)
        for number, (hidden, rows) in enumerate(self._passes(batch, self.passes_at(done))):
            about = batch.row_indices(rows)
            counts = None if known is None else known[about]
            states = batch.select(hidden, rows)
            total = total + DECAY**number * soft_cross_entropy(states, self.lm_head.weight, chances[about], counts)
        yield total

    def guesses(self, batch: TrainingBatch) -> Iterator[tuple[Tensor, slice]]:
        """Those of each pass."""
        return self._passes(batch, self.passes)

    def passes_at(self, done: float) -> int:
        """How many passes are trained after that share of a run: one for the first three fifths, all in the last
        one."""
        return min(self.passes, 1 + max(0, math.ceil((done - FIRST_ALONE) / ADDED_IN * (self.passes - 1))))

    def _passes(self, batch: TrainingBatch, passes: int) -> Iterator[tuple[Tensor, slice]]:
        """The states of each pass's guesses, [B, R, H], and the target's rows they are compared with.

        Rows that do not have a row for every pass of the head are cut.
        """
        texts, length = batch.tokens.shape
        rows, head = length - self.passes - 1, self.served(length)
        store: Any = _Chains(self.described, texts, texts * rows, batch.tokens.device)
        with references():
            hidden = head.fuse({name: batch.features[name][:, :rows].flatten(0, 1) for name in self.needs})
        for number in range(passes):
            tokens = batch.tokens[:, 1 + number : 1 + number + rows]
            with references():
                tokens, hidden = self.inputs(tokens, hidden.float(), number, head)
                # row t of this pass is at position t + number
                normed, hidden = head.states(store.rows(tokens, number), hidden, store)
            yield normed.unflatten(0, (texts, rows)), slice(1 + number, 1 + number + rows)

    def inputs(self, tokens: Tensor, hidden: Tensor, number: int, head: EagleHead) -> tuple[Tensor, Tensor]:
        """What a pass's rows read: tokens, int64[B, R], and features or states, [B R, H]. tokens: of the text."""
        return tokens, hidden

    def published(self) -> dict[str, Tensor]:
        """The tensors under the authors' names."""
        return {name.replace("layers.0.", "midlayer."): each for name, each in super().published().items()}

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them, in SpecForge's format. Layers are named by their inputs."""
        shape = asdict(self.shape)
        layers = list(shape.pop("layers"))
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **shape,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "target_model": target,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
        }


class PEagleModel(EagleModel):
    """A P-EAGLE head. mask: the token of masked rows, the last one of the vocabulary."""

    def __init__(self, shape: EagleShape, embed: Tensor, token_ids: Tensor, lm_head: Tensor, passes: int = 7) -> None:
        self.mask = shape.vocab_size - 1
        super().__init__(shape, embed, token_ids, lm_head, passes, self.mask)

    def inputs(self, tokens: Tensor, hidden: Tensor, number: int, head: EagleHead) -> tuple[Tensor, Tensor]:
        """EAGLE's in the first pass, masks in the others."""
        if number == 0:
            return tokens, hidden
        assert head.mask is not None
        return torch.full_like(tokens, self.mask), head.mask.float().expand_as(hidden)

    def passes_at(self, done: float) -> int:
        """Always all of them: they run as one."""
        return self.passes

    def published(self) -> dict[str, Tensor]:
        """The tensors under speculators' names."""
        named = super().published().items()
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in named}

    def config(self, target: str) -> dict[str, object]:
        """The config.json for them, in speculators' format."""
        layer = super().config(target)
        del layer["eagle_config"], layer["architectures"]
        return {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "transformer_layer_config": layer,
            "draft_vocab_size": layer.pop("draft_vocab_size"),
            "eagle_aux_hidden_state_layer_ids": list(self.shape.layers),
            "mask_token_id": self.mask,
            "norm_before_residual": False,
            "speculators_config": {
                "algorithm": "peagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.passes}],
                "verifier": {"name_or_path": layer.pop("target_model"), "architectures": []},
            },
        }
