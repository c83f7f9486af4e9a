from __future__ import annotations

import pytest

from foresay.server.metrics import selfcheck


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time begins soon."""
    monkeypatch.setattr(selfcheck, "QUIET_SECONDS", 0.03)
