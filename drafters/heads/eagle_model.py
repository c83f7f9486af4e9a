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
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.lesson import Depth, Lesson, judge, soft_cross_entropy, spread, vocabulary
from foresay.drafters.heads.walk import LlamaShape, NormLayer, TrainedLayer

#: The weight of each pass relative to the one before.
DECAY = 0.8
#: The share of a run with only the first pass, and the share in which the others are added one by one.
FIRST_ALONE, ADDED_IN = 0.6, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape(LlamaShape):
    """The shape of a head. layers: the target's layers whose inputs it reads."""

    draft_vocab_size: int
    layers: tuple[int, ...]


class EagleModel(nn.Module):
    """One head. embed: [V, H], the target's, not trained. token_ids: int64[V'], the target's id of each draft id."""

    embed: Tensor
    token_ids: Tensor

    def __init__(self, shape: EagleShape, embed: Tensor, token_ids: Tensor, lm_head: Tensor, passes: int = 6) -> None:
        super().__init__()
        self.shape, self.passes = shape, passes
        self.needs = tuple(f"layer.{layer}" for layer in shape.layers)
        width, shown = shape.hidden_size, shape.described("LlamaForCausalLM")
        self.fc = nn.Linear(width * len(shape.layers), width, bias=False)
        # Its norms apply to its input, each half separately.
        node = replace(shown.first, norms=replace(shown.first.norms, before_attention=None))
        self.midlayer = TrainedLayer(node, width, shown.max_positions, read=2 * width)
        self.midlayer.input_layernorm, self.midlayer.hidden_norm = (NormLayer(node.norm, width) for _ in range(2))
        self.norm = NormLayer(node.norm, width)
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head[token_ids])
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("token_ids", token_ids)

    def losses(self, lesson: Lesson, done: float = 1.0) -> Iterator[Tensor]:
        """One loss: later passes count less, rows whose likeliest token is not a draft token do not count.

        done: the completed share of the run. Later passes are only trained towards its end: a head learns mostly from
        the first pass, which costs a fraction of them all.
        """
        chances, known = lesson.chances(slice(None), self.token_ids)
        total = torch.zeros((), device=lesson.tokens.device)
        for number, (hidden, rows) in enumerate(self._passes(lesson, self.passes_at(done))):
            about = lesson.about(rows)
            counts = None if known is None else known[about]
            states = lesson.taken(hidden, rows)
            total = total + DECAY**number * soft_cross_entropy(states, self.lm_head.weight, chances[about], counts)
        yield total

    @torch.no_grad()
    def judged(self, lesson: Lesson, generator: torch.Generator) -> list[Depth]:
        """The quality of each pass."""
        found = []
        for hidden, rows in self._passes(lesson, self.passes):
            target_logits = lesson.target_logits(rows)
            guessed = self.lm_head(lesson.taken(hidden, rows))
            found.append(judge(spread(target_logits, self.token_ids, guessed), target_logits, generator))
        return found

    @property
    def _truncated(self) -> bool:
        return self.shape.draft_vocab_size < self.shape.vocab_size

    def passes_at(self, done: float) -> int:
        """How many passes are trained after that share of a run: one for the first three fifths, all in the last
        one."""
        return min(self.passes, 1 + max(0, math.ceil((done - FIRST_ALONE) / ADDED_IN * (self.passes - 1))))

    def _passes(self, lesson: Lesson, passes: int) -> Iterator[tuple[Tensor, slice]]:
        """The states of each pass's guesses, [B, R, H], and the target's rows they are compared with.

        Rows that do not have a row for every pass of the head are cut.
        """
        rows = lesson.tokens.shape[1] - self.passes - 1
        embedded = functional.embedding(lesson.tokens, self.embed)
        state = self.fc(torch.cat([lesson.features[name] for name in self.needs], dim=-1)[:, :rows]).float()
        chain: list[tuple[Tensor, Tensor]] = []
        for number in range(passes):
            state = self._pass(*self.inputs(embedded, state, number), number, chain)
            yield self.norm(state), slice(1 + number, 1 + number + rows)

    def inputs(self, embedded: Tensor, state: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The inputs of a pass's rows, embedding and state, both [B, R, H]. embedded: of the whole text."""
        return embedded[:, 1 + number : 1 + number + state.shape[1]], state

    def _pass(self, embedded: Tensor, state: Tensor, number: int, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The next state; the pass's keys and values are appended to ``chain``."""
        layer = self.midlayer
        mixed = torch.cat((layer.normed("input_layernorm", embedded), layer.normed("hidden_norm", state)), dim=-1)
        query, key, value = layer.heads(mixed, number)  # row t of this pass is at position t + number
        chain.append((key, value))
        return layer.finish(state, mixed, self._attend(query, chain))

    def _attend(self, query: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        query = query * self.midlayer.node.attention.scale
        first_keys, first_values = chain[0]
        scores = query @ first_keys.mT
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        own = [(query * keys).sum(dim=-1, keepdim=True) for keys, _ in chain[1:]]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(dim=-1).to(first_values.dtype)
        rows = scores.shape[-1]
        total: Tensor = weights[..., :rows] @ first_values
        for index, (_, values) in enumerate(chain[1:]):
            total = total + weights[..., rows + index : rows + index + 1] * values
        return total.transpose(1, 2).flatten(2)

    def published(self) -> dict[str, Tensor]:
        """The tensors under the authors' names."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        return tensors | (vocabulary(self.token_ids, self.shape.vocab_size) if self._truncated else {})

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
        super().__init__(shape, embed, token_ids, lm_head, passes)
        self.mask = shape.vocab_size - 1
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def inputs(self, embedded: Tensor, state: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """EAGLE's in the first pass, masks in the others."""
        if number == 0:
            return super().inputs(embedded, state, number)
        masks = self.embed[self.mask], self.fc(self.mask_hidden).float()
        return masks[0].expand_as(state), masks[1].expand_as(state)

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
