"""A head's draft vocabulary: which of the target's tokens its output rows stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.heads.files import HeadTensors
from foresay.verifier.model.errors import WeightsError


def token_ids(files: HeadTensors, vocab: int, target: int) -> Tensor | None:
    """int64[V'], the target's id of each of the ``vocab`` draft ids; None where they are the same.

    A file has their distances (``d2t``) and mostly a mask of the ``target`` ids, which of them are drafted (``t2d``).
    Raises WeightsError if the two do not say the same, or name what the target does not have.
    """
    offsets = files.optional("d2t", (vocab,))
    if offsets is None:
        if vocab != target:
            raise WeightsError(f"{files.where}: d2t is missing, but the draft vocabulary has {vocab} tokens")
        return None
    ids = torch.arange(vocab) + offsets.long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < target:
        raise WeightsError(f"{files.where}: d2t names tokens that the target does not have")
    if len(ids.unique()) < vocab:
        raise WeightsError(f"{files.where}: d2t names a token of the target twice")
    mask = files.optional("t2d", (target,))
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), ids.sort().values):
        raise WeightsError(f"{files.where}: d2t and t2d name different tokens of the target")
    return ids if vocab != target or bool(offsets.any()) else None
