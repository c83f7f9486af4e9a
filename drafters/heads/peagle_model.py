"""A P-EAGLE head that learns: an EAGLE-3 head whose passes behind the first have masks where that has its own states
and the text, so that all of them can be run at once.

::

    pass 1    row t: feature t of the target, token t + 1    guesses token t + 2
    pass j    row t: the learnt feature, the mask's token    guesses token t + j + 1
              sees the rows of pass 1 up to t, and the masks of passes 2 .. j at t

As published by speculators (``speculators/models/peagle``), which draws at random the rows that a pass goes over; here
all of them are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foresay.drafters.heads.eagle_model import EagleModel, EagleShape


class PEagleModel(EagleModel):
    """One head. mask: the token of rows that have none, the last one of the vocabulary."""

    def __init__(self, shape: EagleShape, embed: Tensor, token_ids: Tensor, lm_head: Tensor, passes: int = 7) -> None:
        super().__init__(shape, embed, token_ids, lm_head, passes)
        self.mask = shape.vocab_size - 1
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def inputs(self, embedded: Tensor, state: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """As EAGLE's in the first pass, masks in the others."""
        if number == 0:
            return super().inputs(embedded, state, number)
        masks = self.embed[self.mask], self.fc(self.mask_hidden).float()
        return masks[0].expand_as(state), masks[1].expand_as(state)

    def passes_at(self, done: float) -> int:
        """All of them, whatever is done: they are one pass."""
        return self.passes

    def published(self) -> dict[str, Tensor]:
        """The tensors by speculators' names."""
        named = super().published().items()
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in named}

    def config(self, target: str) -> dict[str, object]:
        """The config.json beside them, as speculators writes it."""
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
