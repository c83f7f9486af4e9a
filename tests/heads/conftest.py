from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.verifier.families import make
from tests.verifier.reading import load_decoder
from verifier.model.decoder import Decoder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much of their time to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """Random targets of six layers, by family."""

    @cache
    def made(family: str) -> Decoder:
        directory: Path = tmp_path_factory.mktemp(family)
        make(family, directory, num_hidden_layers=6)
        return load_decoder(directory)

    return made
