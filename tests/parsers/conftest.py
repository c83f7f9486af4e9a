from __future__ import annotations

from functools import cache

import pytest

from foresay.server.text.tokenizer import Tokenizer
from tests.parsers.families import family_tokenizer

made = cache(family_tokenizer)


@pytest.fixture
def family() -> str:
    """Which family of models; tests parametrize it."""
    return "hermes"


@pytest.fixture
def tokenizer(family) -> Tokenizer:
    return made(family)
