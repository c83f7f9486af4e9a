from __future__ import annotations

import pytest

from foresay.server.text.tokenizer import Tokenizer
from tests.responses.conftest import TEMPLATE
from tests.server.conftest import byte_level_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def able() -> Tokenizer:
    """A tokenizer whose template knows tools and reasoning."""
    return byte_level_tokenizer(TEMPLATE)
