from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.verifier.faked_hub import cache as cache
from tests.verifier.faked_hub import hub as hub
from tests.verifier.families import make
from tests.verifier.reading import load_decoder
from verifier.model.decoder import Decoder


@dataclass(frozen=True)
class Family:
    """A random tiny model: as transformers has it, and our decoder by dtype."""

    oracle: Any
    decoder: Callable[[torch.dtype], Decoder]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Models by the names of ``tests.verifier.families``, each made once."""

    @functools.cache
    def made(name: str) -> Family:
        directory = tmp_path_factory.mktemp(name)
        oracle = make(name, directory)
        return Family(oracle, functools.cache(lambda dtype: load_decoder(directory, dtype)))

    return made
