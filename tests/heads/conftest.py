from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from foresay.verifier.model.decoder import Decoder
from tests.verifier.families import make
from tests.verifier.reading import load_decoder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """Random targets of six layers, by family."""

    @cache
    def made(family: str) -> Decoder:
        directory: Path = tmp_path_factory.mktemp(family)
        make(family, directory, num_hidden_layers=6)
        return load_decoder(directory)

    return made
