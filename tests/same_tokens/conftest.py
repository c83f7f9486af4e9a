from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.same_tokens.models import Pair, make_pair

#: Random models with inner widths at which a product of one row has other bits than a product of many: the family
#: (qwen3's weights are of bf16) and what differs.
WIDE = {
    "wide1536": ("llama3", {"hidden_size": 320, "intermediate_size": 1536, "head_dim": 64}),
    "wide3072": ("llama3", {"hidden_size": 512, "intermediate_size": 3072, "head_dim": 64}),
    "half1536": ("qwen3", {"hidden_size": 320, "intermediate_size": 1536, "head_dim": 64}),
}
#: Families of which layers of both kinds read the keys of others.
SHARING = ("gemma4", "gemma4_embedded")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Targets with a draft model each, made once: by family, or a name in ``WIDE``; layers: of both."""

    @cache
    def made(name: str, dtype: torch.dtype = torch.float32, layers: int = 3) -> Pair:
        family, shape = name, {"num_hidden_layers": max(layers, 4) if name in SHARING else layers}
        if name in WIDE:
            family, width = WIDE[name]
            shape = {"num_hidden_layers": 2, "max_position_embeddings": 1024, **width}
        return make_pair(family, tmp_path_factory.mktemp(name), dtype, **shape)

    return made
