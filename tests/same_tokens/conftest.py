from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.same_tokens.models import Pair, make_pair
from tests.verifier.families import FAMILIES

#: Random models with inner widths at which a product of one row has other bits than a product of many.
WIDE = {
    "wide1536": {"hidden_size": 320, "intermediate_size": 1536, "head_dim": 64},
    "wide3072": {"hidden_size": 512, "intermediate_size": 3072, "head_dim": 64},
}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Targets with a draft model each, made once: by family, or ``wide1536`` and ``wide3072``; layers: of both."""

    @cache
    def made(name: str, dtype: torch.dtype = torch.float32, layers: int = 3) -> Pair:
        shape = {"num_hidden_layers": layers}
        if name in WIDE:
            shape = {"num_hidden_layers": 2, "max_position_embeddings": 1024, **WIDE[name]}
        family = name if name in FAMILIES else "llama3"
        return make_pair(family, tmp_path_factory.mktemp(name), dtype, **shape)

    return made
