from __future__ import annotations

import pytest

from foresay.server.text.tokenizer import Tokenizer
from tests.server.conftest import byte_level_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()
