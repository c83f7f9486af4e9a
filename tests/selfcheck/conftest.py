from __future__ import annotations

import pytest

from foresay.server.observe.selfcheck import check
from foresay.server.text.tokenizer import Tokenizer
from tests.server.conftest import byte_level_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time begins soon."""
    monkeypatch.setattr(check, "QUIET_SECONDS", 0.03)
