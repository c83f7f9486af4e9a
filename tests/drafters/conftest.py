from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.same_tokens.models import Pair, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """A random target of a family and a draft model that often agrees with it."""

    @cache
    def made(family: str, layers: int = 3) -> Pair:
        return make_pair(family, tmp_path_factory.mktemp(family), torch.float32, num_hidden_layers=layers)

    return made
