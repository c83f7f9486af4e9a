from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from tests.same_tokens.models import Pair, make_pair


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much of their time to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A random target of a family and a draft model that often agrees with it."""
    return cache(lambda family: make_pair(family, tmp_path_factory.mktemp(family), torch.float32))
