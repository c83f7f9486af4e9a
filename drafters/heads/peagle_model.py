"""A P-EAGLE head in training: an EAGLE-3 head whose passes after the first have masks instead of its own states and the
text, so that all of them can run at once.

::

    pass 1    row t: feature t of the target, token t + 1    guesses token t + 2
    pass j    row t: the learnt feature, the mask's token    guesses token t + j + 1
              attends to the rows of pass 1 up to t, and the masks of passes 2 .. j at t

As in speculators (``speculators/models/peagle``), which samples the rows of each pass at random; here every pass has
all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foresay.drafters.heads.eagle_model import EagleModel, EagleShape


class PEagleModel(EagleModel):
    """One head. mask: the token of masked rows, the last one of the vocabulary."""

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
