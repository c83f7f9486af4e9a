from __future__ import annotations

from pathlib import Path

import pytest

from tests.checking.pairs import make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model, heads of every published layout, and models that do not fit; only ever read."""
    return make_models(tmp_path_factory.mktemp("models"))
