from __future__ import annotations

import pytest

from foresay.server.observe.selfcheck import check


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time begins soon."""
    monkeypatch.setattr(check, "QUIET_SECONDS", 0.03)
